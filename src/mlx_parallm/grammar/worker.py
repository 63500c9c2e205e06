"""The child process that tries grammars: `python -m mlx_parallm.grammar.worker`.

stdout: ""                                                  it has started
stdin:  {"kind": "regex", "source": "[0-9]+"}               one grammar a line
stdout: "" or "why it cannot be followed"
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import resource
from typing import BinaryIO

from llguidance import LLTokenizer

from mlx_parallm.children.pipes import private_pipes
from mlx_parallm.core import GrammarKind, GrammarSpec
from mlx_parallm.grammar.definitions import RefusedGrammar, matcher

START_S = 60.0
"""For a child to start."""

LIMIT_S = 3.0
"""For one grammar."""

_GRACE_S = 5.0
_MOST_BYTES = 2 << 30


def main() -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS refuses; there time alone is the limit
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    requests, replies = private_pipes()
    tokenizer = LLTokenizer("byte")
    _say(replies, "")
    for line in requests:
        # The parent kills a child that takes too long. This one, which needs no GIL, is for when the parent is gone.
        faulthandler.dump_traceback_later(LIMIT_S + _GRACE_S, exit=True)
        grammar = json.loads(line)
        _say(replies, _fault(tokenizer, GrammarSpec(GrammarKind(grammar["kind"]), grammar["source"])))
        faulthandler.cancel_dump_traceback_later()


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
