"""A first try at a grammar where it can be stopped.

llguidance bounds the work for a token, but not that of building every grammar: some patterns of a few characters, as
`a{1000}{1000}{1000}`, would take hours and all memory. So each grammar is first built in a child process that is killed
when it takes too long.
"""

from __future__ import annotations

import json
import selectors
from subprocess import PIPE, Popen
from threading import Lock

from mlx_parallm.children.start import command, environment
from mlx_parallm.core import GrammarSpec
from mlx_parallm.errors import EngineError, OverloadedError
from mlx_parallm.grammar.definitions import RefusedGrammar
from mlx_parallm.grammar.worker import LIMIT_S, START_S

_PATIENCE_S = 10.0
"""How long a grammar waits for others to be tried."""


class Trial:
    """One child process, started when there is something to try. Any thread; one grammar at a time."""

    def __init__(self) -> None:
        self._child: Popen[bytes] | None = None
        self._lock = Lock()

    def check(self, spec: GrammarSpec) -> None:
        """Returns where the grammar can be built in time.

        Raises:
            RefusedGrammar: it cannot.
            OverloadedError: too many others are being tried.
            EngineError: the child could not be started.
        """
        if not self._lock.acquire(timeout=_PATIENCE_S):
            raise OverloadedError("Other grammars are being compiled; try again.")
        try:
            reason = self._ask(spec)
        finally:
            self._lock.release()
        if reason:
            raise RefusedGrammar(reason)

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _ask(self, spec: GrammarSpec) -> str:
        """Why it cannot be built; empty where it can."""
        child = self._running()
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps({"kind": spec.kind, "source": spec.source}).encode() + b"\n")
            child.stdin.flush()
            said = _line(child, LIMIT_S)
        except OSError:
            said = b""
        if said:
            return str(json.loads(said))
        died = child.poll() is not None
        self._kill()
        return "it takes more memory than there is" if died else f"it takes more than {LIMIT_S:g} s to compile"

    def _running(self) -> Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._kill()
        try:
            self._child = Popen(
                command("mlx_parallm.grammar.worker"),
                env=environment(),
                stdin=PIPE,
                stdout=PIPE,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is not for it
            )
        except OSError as error:
            raise EngineError(f"the process that tries grammars could not be started: {error}") from error
        if not _line(self._child, START_S):
            self._kill()
            raise EngineError("the process that tries grammars did not start")
        return self._child

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


def _line(child: Popen[bytes], within_s: float) -> bytes:
    """The next line it says; empty where it ends, or says nothing in time. It says short lines, each at once."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        return child.stdout.readline() if selector.select(within_s) else b""
