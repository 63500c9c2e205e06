"""Compiles a grammar on trial in a child process, where the compilation can be stopped.

llguidance bounds the work for a token, but not the work to build a grammar: some patterns of a few characters, such as
`a{1000}{1000}{1000}`, would take hours and all memory. The child has limits of time and memory, and a low priority, so
that requests in progress come first. It is this module, run as `python -m mlx_parallm.grammar.trial CPU_LIMIT_S`:

    stdout: ""                                                  it has started
    stdin:  {"kind": "regex", "source": "[0-9]+"}               one grammar a line
    stdout: "" if it can be compiled, else the reason
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, LifoQueue
from subprocess import PIPE, Popen
from typing import BinaryIO

from llguidance import LLTokenizer

from mlx_parallm.core.grammar import GrammarKind, GrammarSpec
from mlx_parallm.errors import EngineError, OverloadedError
from mlx_parallm.grammar.matcher import GrammarRefused, build_matcher
from mlx_parallm.processes import command, environment, private_pipes

CHILDREN = 2
"""Grammars that are checked at the same time."""

_QUEUE_TIMEOUT_S = 10.0
"""How long a grammar waits for a free child."""

_START_TIMEOUT_S = 60.0
_WALL_LIMIT_S = 30.0
"""For one grammar. The child's own limit counts processor time only, for which it may wait because of its priority."""

CPU_LIMIT_S = 3.0
"""Processor time for one grammar."""

_MEMORY_LIMIT = 2 << 30
_NICENESS = 10
"""With this niceness the child gets about a tenth of a core on which another process runs too."""


class Trial:
    """A pool of child processes, each started at its first use. Any thread; a child checks one grammar at a time.

    Args:
        cpu_limit_s: seconds of processor time for one grammar.
    """

    def __init__(self, cpu_limit_s: float = CPU_LIMIT_S) -> None:
        self._children = [_Child(cpu_limit_s) for _ in range(CHILDREN)]
        self._idle: LifoQueue[_Child] = LifoQueue()
        for child in self._children:
            self._idle.put(child)

    def check(self, spec: GrammarSpec) -> None:
        """Returns if the grammar can be compiled within the limits.

        Raises:
            GrammarRefused: it cannot.
            OverloadedError: no child became free in time, or the machine is too busy or too short of memory to decide.
            EngineError: the child could not be started.
        """
        with self._child() as child:
            reason = child.check(spec)
        if reason:
            raise GrammarRefused(reason)

    def close(self) -> None:
        """Ends the children. Checks in progress fail at once."""
        for child in self._children:
            child.interrupt()
        for _ in self._children:
            self._idle.get().kill()

    @contextmanager
    def _child(self) -> Iterator[_Child]:
        """An idle child, the last used one first, so that no more children start than are needed."""
        try:
            child = self._idle.get(timeout=_QUEUE_TIMEOUT_S)
        except Empty:
            raise OverloadedError("Other grammars are being compiled; try again.") from None
        try:
            yield child
        finally:
            self._idle.put(child)


class _Child:
    """One child process, used by one thread at a time. `cpu_limit_s`: see `Trial`."""

    def __init__(self, cpu_limit_s: float) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._process: Popen[bytes] | None = None
        self._interrupted = False
        # By how the child ends. Without memory Rust aborts, the stack overflows, or Python exits with 1 (MemoryError).
        # Any other end comes from outside.
        self._verdicts = dict.fromkeys(
            (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, 1), "it takes more memory than there is"
        ) | {-signal.SIGPROF: f"it takes more than {cpu_limit_s:g} s to compile"}

    def check(self, spec: GrammarSpec, again: bool = True) -> str:
        """The reason why the grammar cannot be compiled; empty if it can.

        Args:
            again: whether to try once more if something outside ends the child, such as the system's OOM killer.

        Raises:
            OverloadedError: the child took too long, or was ended from outside.
            EngineError: it could not be started.
        """
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"kind": spec.kind, "source": spec.source}).encode() + b"\n")
            reply = _read_line(process, _WALL_LIMIT_S)
        except OSError:  # it has ended since `_running` looked
            reply = b""
        if reply is None:
            process.kill()
        reason = json.loads(reply) if reply else self._verdicts.get(process.wait())
        if reason is not None:
            return str(reason)
        if again and reply is not None and not self._interrupted:
            return self.check(spec, again=False)
        raise OverloadedError("The machine is too busy to compile this grammar now; try again.")

    def interrupt(self) -> None:
        """Makes a check in progress return at once. Any thread."""
        self._interrupted = True
        if (process := self._process) is not None:
            process.kill()

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.kill()
        try:
            self._process = Popen(
                command("mlx_parallm.grammar.trial", str(self._cpu_limit_s)),
                env=environment(),
                stdin=PIPE,
                stdout=PIPE,
                bufsize=0,
                # A group of its own, so that Ctrl-C does not reach it; not a session of its own, because Linux may
                # share processor time between sessions, whatever the priorities of their processes.
                process_group=0,
            )
        except OSError as error:
            raise EngineError(f"the process that checks grammars could not be started: {error}") from error
        if not _read_line(self._process, _START_TIMEOUT_S):
            self.kill()
            raise EngineError("the process that checks grammars did not start")
        return self._process


def _read_line(process: Popen[bytes], timeout_s: float) -> bytes | None:
    """The next line of its output: empty if the process has ended, None after the timeout.

    The child writes each (short) line in one call, so `readline` does not wait for the rest of a line.
    """
    assert process.stdout is not None
    with selectors.PollSelector() as selector:  # needs no descriptor, of which there may be none left
        selector.register(process.stdout, selectors.EVENT_READ)
        return process.stdout.readline() if selector.select(timeout_s) else None


# ---- the child ---------------------------------------------------------------------------------


def main(cpu_limit_s: float) -> None:
    with suppress(ValueError, OSError):  # macOS refuses the limit; there only time is limited
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT, _MEMORY_LIMIT))
    os.nice(_NICENESS)
    requests, replies = private_pipes()
    tokenizer = LLTokenizer("byte")
    _reply(replies, "")
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # SIGPROF ends the process, whatever it is doing
        grammar = json.loads(line)
        reason = _reason_to_refuse(tokenizer, GrammarSpec(GrammarKind(grammar["kind"]), grammar["source"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(replies, reason)


def _reason_to_refuse(tokenizer: LLTokenizer, spec: GrammarSpec) -> str:
    try:
        build_matcher(tokenizer, spec)
    except GrammarRefused as refused:
        return str(refused)
    return ""


def _reply(replies: BinaryIO, reason: str) -> None:
    replies.write(json.dumps(reason).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
