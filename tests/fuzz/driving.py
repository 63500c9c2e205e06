"""Targets of fuzzing, the limits that every input keeps to, and a driver that needs no package.

A target is a module of `fuzz.targets` with a function `run`, which takes an input and raises if something comes out
that the product does not promise. `mutated` makes other inputs of one. `coverage` is the other driver.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzz import targets
from fuzz.mutation import Mutate, bytes_mutated

CPU_LIMIT_S = 2.0
MEMORY_LIMIT = 1 << 30
CORPUS = Path(__file__).with_name("corpus")
NAMES = sorted(module.name for module in pkgutil.iter_modules(targets.__path__))


class TooSlow(BaseException):
    """An input took more than its limit of processor time. It is no Exception, because readers may catch those."""


@dataclass(frozen=True)
class Target:
    name: str
    run: Callable[[bytes], None]
    mutated: Mutate

    def corpus(self) -> list[Path]:
        """The inputs that are kept, smallest first."""
        return sorted((CORPUS / self.name).iterdir(), key=lambda path: (path.stat().st_size, path.name))

    def changes(self, inputs: Sequence[bytes], seed: int) -> Iterator[bytes]:
        """Changes of these inputs, and changes of those, without end. The same seed makes the same ones."""
        rng, later = Random(seed), list(inputs)
        self.mutated(inputs[0], Random(seed))  # some look for words before their first change
        while True:
            at = rng.randrange(len(inputs))
            later[at] = self.mutated(rng.choice((inputs, later))[at], rng)
            yield later[at]


def load(name: str) -> Target:
    """Imports a target, and with it what it tries."""
    module = importlib.import_module(f"fuzz.targets.{name}")
    return Target(name, module.run, getattr(module, "mutated", bytes_mutated))


@dataclass
class Runner:
    """Runs inputs within the limits. An input that fails is written to the folder `found`, and its error raised.
    `limit_s`: the most processor time of each. `slowest_s`: that of the slowest. `peak`: the most bytes that the
    process has had."""

    target: Target
    found: Path
    limit_s: float = CPU_LIMIT_S
    count: int = 0
    slowest_s: float = 0.0
    peak: int = 0

    def __call__(self, data: bytes) -> None:
        """Raises what the target raises; TooSlow; MemoryError: the process has become too large."""
        began = time.process_time()
        try:
            with _limited_time(self.limit_s):
                self.target.run(data)
            self.peak = peak_bytes()
            if self.peak > MEMORY_LIMIT:
                raise MemoryError(f"the process has {self.peak >> 20} MiB")
        except BaseException:
            self.found.mkdir(parents=True, exist_ok=True)
            (self.found / f"{self.target.name}-{hashlib.sha1(data).hexdigest()[:16]}").write_bytes(data)
            raise
        self.count += 1
        self.slowest_s = max(self.slowest_s, time.process_time() - began)


def peak_bytes() -> int:
    """The most memory that this process has had."""
    if sys.platform == "linux":  # where getrusage counts the memory of the process that has started this one, too
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    """Raises TooSlow between two instructions of Python; what never returns to Python is left to a time limit of the
    process."""

    def late(*_: object) -> None:
        raise TooSlow(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
