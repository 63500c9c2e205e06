"""Runs tests in forks of this process, which has imported once what they import from others.

Importing transformers, FastAPI and their like takes seconds; a fork takes some milliseconds. A fork imports the package
itself and the tests anew. Forking is safe because no thread exists: nothing of MLX, BLAS or tokenizers has run.

Time of the clock decides nothing, because the machine may be busy. A fork is stopped when it has used more CPU time
since a test ended than it was given for one, or when its processes have not wanted the CPU for `IDLE_S` seconds.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from mutation.watching import Progress, Reach

MARKS = "not slow and not ci"
IDLE_S = 20.0
_POLL_S, _FAST_POLL_S, _FAST_S = 0.5, 0.01, 3.0
_OTHERS = ("hypothesis.stateful", "httpx", "openai", "pytest_asyncio", "pytest_timeout", "xdist", "numpy.testing")


class Copy:
    """The newest commit's files in a folder of their own, which becomes the current one; tests run there."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        self.progress = folder / "progress.txt"
        self._written = 0
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": str(folder), "OPENBLAS_NUM_THREADS": "1"}
        sys.path[:0] = [str(folder), str(folder / "tests")]
        _import_others()

    def write(self, file: str, source: bytes) -> None:
        """Writes a file, with a time that no compiled file of it can have."""
        path = self.folder / file
        path.write_bytes(source)
        self._written += 1
        os.utime(path, (10 * self._written, 10 * self._written))

    def pytest(self, tests: list[str], cpu_s: float, reach: Path | None = None) -> tuple[str, str | None]:
        """Runs tests until one fails, with at most so much CPU time for each. Returns `passed`, `failed` or `too long`,
        and the test that failed if one did. With `reach`, all tests run, see `watching.Reach`."""
        self.progress.write_text("")
        process = os.fork()
        if process == 0:
            self._run_tests(tests, reach)
        try:
            status = self._ended(process, cpu_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        ended = self.progress.read_text().splitlines()
        failed = next((line.removeprefix("failed ") for line in ended if line.startswith("failed ")), None)
        if status is None:
            return "too long", failed
        if status in (4, 5) and reach is None:  # a test was not found, as a mutant has changed its name or an import
            return "failed", tests[0]
        return ("failed" if status else "passed"), failed

    def _run_tests(self, tests: list[str], reach: Path | None) -> None:
        """In the fork: never returns."""
        code = 3
        try:
            os.setsid()
            log = os.open(self.folder / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            import pytest

            stop = ["-x"] if reach is None else []
            plugins = [Progress(self.progress), *([Reach(reach)] if reach else [])]
            options = ["-q", "-n0", "-m", MARKS, "-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=short"]
            code = pytest.main([*options, *stop, *tests], plugins=plugins)
        finally:
            os._exit(code)

    def _ended(self, process: int, cpu_s: float) -> int | None:
        """The fork's exit status, or the number of the signal that ended it, negative. None if it took too long."""
        started = idle_since = time.monotonic()
        size, cpu = 0, 0.0
        while True:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() - started < _FAST_S:
                time.sleep(_FAST_POLL_S)
                continue
            time.sleep(_POLL_S)
            written, used = self.progress.stat().st_size, _cpu_s(process)
            if written != size or _wants_cpu(process):
                idle_since = time.monotonic()
            if written != size:
                size, cpu = written, used
            elif used - cpu > cpu_s or time.monotonic() - idle_since > IDLE_S:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return None


def _import_others() -> None:
    """Imports what the package imports from others, by importing all of it and forgetting what is its own."""
    _forget_package()
    package = importlib.import_module("mlx_parallm")
    for module in pkgutil.walk_packages(package.__path__, "mlx_parallm.", onerror=lambda name: None):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):
                importlib.import_module(module.name)
    for name in _OTHERS:
        with suppress(ImportError):
            importlib.import_module(name)
    _forget_package()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"an import has started {len(threads) - 1} threads; a fork would not have them")
    gc.collect()
    gc.freeze()


def _forget_package() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_parallm"]:
        del sys.modules[name]


def _wants_cpu(session: int) -> bool:
    """Whether a thread of a process of a session runs, or waits for the CPU or for a disk."""
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if not process.name.isdecimal() or int(_stat(process / "stat")[3]) != session:
                continue
            if any(_stat(task / "stat")[0] in "RD" for task in (process / "task").iterdir()):
                return True
    return False


def _cpu_s(process: int) -> float:
    """The CPU seconds that a process has used, in all its threads."""
    user, system = _stat(Path(f"/proc/{process}/stat"))[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _stat(file: Path) -> list[str]:
    """What Linux says of a process or a thread, from its state on."""
    return file.read_text().rpartition(")")[2].split()
