"""The child process that scores: `python -m mlx_parallm.rl.scoring.worker <seconds for a group>`.

stdin:  {"id": 7, "scorer": "exact", "samples": [...]}      one group a line
stdout: {"id": 7, "begun": true}                            the scorer is loaded: the group's time runs
        {"id": 7, "rewards": [1.0, 0.0]}  or  {"id": 7, "error": "..."}
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
from typing import Any, BinaryIO

from mlx_parallm.children.pipes import private_pipes
from mlx_parallm.rl.scoring.registry import load
from mlx_parallm.rl.scoring.sample import Sample

LOAD_S = 120.0
"""For a child to start and import a scorer; not counted as the group's time."""

_GRACE_S = 5.0
_NICE = 10
_LONGEST_ERROR = 300


def main() -> None:
    os.nice(_NICE)
    requests, replies = private_pipes()
    limit_s = float(sys.argv[1])
    for line in requests:
        # The parent kills a scorer that hangs. This one, which needs no GIL, is for when the parent is gone.
        faulthandler.dump_traceback_later(LOAD_S + limit_s + _GRACE_S, exit=True)
        _answer(json.loads(line), replies)
        faulthandler.cancel_dump_traceback_later()


def _answer(group: dict[str, Any], replies: BinaryIO) -> None:
    try:
        scorer = load(group["scorer"])
        _say(replies, {"id": group["id"], "begun": True})
        rewards = [_finite(scorer(Sample(**sample))) for sample in group["samples"]]
    except BaseException as error:  # noqa: BLE001 - a scorer may raise anything, SystemExit too; it costs its group
        _say(replies, {"id": group["id"], "error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]})
    else:
        _say(replies, {"id": group["id"], "rewards": rewards})


def _finite(reward: float) -> float:
    if not math.isfinite(reward):
        raise ValueError(f"gave {reward}; a reward must be a finite number")
    return reward


def _say(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
