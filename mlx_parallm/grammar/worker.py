"""The child process that checks grammars for `trial`: `python -m mlx_parallm.grammar.worker`.

stdout: ""                                                  it has started
stdin:  {"kind": "regex", "source": "[0-9]+"}               one grammar a line
stdout: "" if it can be compiled, else the reason
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from typing import BinaryIO

from llguidance import LLTokenizer

from mlx_parallm.core import GrammarKind, GrammarSpec
from mlx_parallm.grammar.matcher import GrammarRefused, build_matcher
from mlx_parallm.processes import private_pipes

CPU_LIMIT_S = 3.0
"""Processor time for one grammar."""

_MEMORY_LIMIT = 2 << 30
_NICENESS = 10
"""With this niceness the child gets about a tenth of a core on which another process runs too."""


def main() -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS refuses the limit; there only time is limited
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT, _MEMORY_LIMIT))
    os.nice(_NICENESS)
    requests, replies = private_pipes()
    tokenizer = LLTokenizer("byte")
    _reply(replies, "")
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # SIGPROF ends the process, whatever it is doing
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
    main()
