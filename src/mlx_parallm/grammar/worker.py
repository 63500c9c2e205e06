"""The child process that tries grammars: `python -m mlx_parallm.grammar.worker`.

stdout: ""                                                  it has started
stdin:  {"kind": "regex", "source": "[0-9]+"}               one grammar a line
stdout: "" or "why it cannot be followed"
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from typing import BinaryIO

from llguidance import LLTokenizer

from mlx_parallm.children.pipes import private_pipes
from mlx_parallm.core import GrammarKind, GrammarSpec
from mlx_parallm.grammar.definitions import RefusedGrammar, matcher

START_S = 60.0
"""For a child to start."""

LIMIT_S = 3.0
"""Processor time for one grammar."""

_NICENESS = 10
"""About a tenth of a core that somebody else wants too."""

_MOST_BYTES = 2 << 30


def main() -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS refuses; there time alone is the limit
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    os.nice(_NICENESS)
    requests, replies = private_pipes()
    tokenizer = LLTokenizer("byte")
    _say(replies, "")
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # SIGPROF ends the process, whatever it is doing
        grammar = json.loads(line)
        reason = _fault(tokenizer, GrammarSpec(GrammarKind(grammar["kind"]), grammar["source"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(replies, reason)


def _fault(tokenizer: LLTokenizer, spec: GrammarSpec) -> str:
    try:
        matcher(tokenizer, spec)
    except RefusedGrammar as refused:
        return str(refused)
    return ""


def _say(replies: BinaryIO, reason: str) -> None:
    replies.write(json.dumps(reason).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
