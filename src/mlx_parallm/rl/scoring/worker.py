"""The child process that scores: `python -m mlx_parallm.rl.scoring.worker`.

stdin:  {"id": 7, "scorer": "exact", "samples": [...]}      one group a line
stdout: {"id": 7, "begun": true}                            the scorer is loaded: the group's time runs
        {"id": 7, "rewards": [1.0, 0.0]}  or  {"id": 7, "error": "..."}

stdin:  {"id": 8, "check": "regex", "metadata": {...}}      can the scorer use this?
stdout: {"id": 8, "begun": true}
        {"id": 8, "refused": ""}  or  {"id": 8, "refused": "metadata.pattern ..."}
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, BinaryIO

from mlx_parallm.children.pipes import private_pipes
from mlx_parallm.children.watch import end_with_parent
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.scoring.limits import TooSlowError, cpu_limit
from mlx_parallm.rl.scoring.registry import BUILTINS, load
from mlx_parallm.rl.scoring.sample import Sample

CHECK_S = 1.0
"""Processor time for a check."""

_NICE = 10
_LONGEST_ERROR = 300


def main() -> None:
    os.nice(_NICE)
    end_with_parent()
    requests, replies = private_pipes()
    for line in requests:
        message = json.loads(line)
        if "check" in message:
            _check(message, replies)
        else:
            _score(message, replies)


def _check(asked: dict[str, Any], replies: BinaryIO) -> None:
    builtin = BUILTINS[asked["check"]]
    builtin.load()
    _say(replies, {"id": asked["id"], "begun": True})
    refused = ""
    try:
        with cpu_limit(CHECK_S):
            if builtin.read is not None:
                builtin.read(asked["metadata"])
    except InvalidRequestError as error:
        refused = str(error)
    except TooSlowError as error:
        refused = f"metadata.{builtin.key} is too complex: checking it {error}"
    _say(replies, {"id": asked["id"], "refused": refused})


def _score(group: dict[str, Any], replies: BinaryIO) -> None:
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
