"""A first try at a grammar where it can be stopped.

llguidance bounds the work for a token, but not that of building every grammar: some patterns of a few characters, as
`a{1000}{1000}{1000}`, would take hours and all memory. So each grammar is first built in a child process, which ends
when that takes too long. The children run at a low priority: requests that are being answered come first.
"""

from __future__ import annotations

import json
import selectors
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, LifoQueue
from subprocess import PIPE, Popen

from mlx_parallm.children.start import command, environment
from mlx_parallm.core import GrammarSpec
from mlx_parallm.errors import EngineError, OverloadedError
from mlx_parallm.grammar.definitions import RefusedGrammar
from mlx_parallm.grammar.worker import LIMIT_S, START_S

CHILDREN = 2
"""Grammars that are tried at the same time."""

_PATIENCE_S = 10.0
"""How long a grammar waits for others to be tried."""

_WALL_LIMIT_S = 30.0
"""For one grammar. Its own limit is of processor time, which a child of low priority may wait for."""


class Trial:
    """Child processes, each started when there is something to try. Any thread; one grammar at a time in each."""

    def __init__(self) -> None:
        self._children = [_Child() for _ in range(CHILDREN)]
        self._idle: LifoQueue[_Child] = LifoQueue()
        for child in self._children:
            self._idle.put(child)

    def check(self, spec: GrammarSpec) -> None:
        """Returns where the grammar can be built in time.

        Raises:
            RefusedGrammar: it cannot.
            OverloadedError: too many others are being tried, or the machine is too busy to tell.
            EngineError: the child could not be started.
        """
        with self._child() as child:
            reason = child.ask(spec)
        if reason:
            raise RefusedGrammar(reason)

    def close(self) -> None:
        """Ends the children; what is being tried is given up."""
        for child in self._children:
            child.interrupt()
        for _ in self._children:
            self._idle.get().kill()

    @contextmanager
    def _child(self) -> Iterator[_Child]:
        """The one that was used last, where several are idle."""
        try:
            child = self._idle.get(timeout=_PATIENCE_S)
        except Empty:
            raise OverloadedError("Other grammars are being compiled; try again.") from None
        try:
            yield child
        finally:
            self._idle.put(child)


class _Child:
    """One child process. One thread at a time."""

    def __init__(self) -> None:
        self._process: Popen[bytes] | None = None

    def ask(self, spec: GrammarSpec) -> str:
        """Why it cannot be built; empty where it can."""
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"kind": spec.kind, "source": spec.source}).encode() + b"\n")
            process.stdin.flush()
            said = _line(process, _WALL_LIMIT_S)
        except OSError:
            said = b""
        if said is None:
            self.kill()
            raise OverloadedError("The machine is too busy to compile this grammar now; try again.")
        if said:
            return str(json.loads(said))
        late = process.wait() == -signal.SIGPROF
        self.kill()
        return f"it takes more than {LIMIT_S:g} s to compile" if late else "it takes more memory than there is"

    def interrupt(self) -> None:
        """Any thread: whoever asks it gets an answer at once."""
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
                command("mlx_parallm.grammar.worker"),
                env=environment(),
                stdin=PIPE,
                stdout=PIPE,
                bufsize=0,
                # Ctrl-C is not for it. Linux may weigh sessions against each other, whatever the priorities of their
                # processes: it stays in the server's.
                process_group=0,
            )
        except OSError as error:
            raise EngineError(f"the process that tries grammars could not be started: {error}") from error
        if not _line(self._process, START_S):
            self.kill()
            raise EngineError("the process that tries grammars did not start")
        return self._process


def _line(process: Popen[bytes], within_s: float) -> bytes | None:
    """The next line it says: empty where it has ended, None where it says nothing in time. It says short lines, each
    at once."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        return process.stdout.readline() if selector.select(within_s) else None
