"""The scoring process: `python -m mlx_parallm.rl.scoring.worker`. It imports neither MLX nor a BLAS.

stdin:  {"id": 7, "scorer": "exact", "samples": [...]}      one group per line; `reward`, if the scorer names it
stdout: {"id": 7, "begun": true}                            the scorer is loaded: the group's time limit starts
        {"id": 7, "rewards": [1.0, 0.0]}  or  {"id": 7, "error": "..."}

stdin:  {"id": 8, "check": "regex", "metadata": {...}}      can the scorer use this metadata?
stdout: {"id": 8, "begun": true}
        {"id": 8, "refused": ""}  or  {"id": 8, "refused": "metadata.pattern ..."}

With the argument NAME it describes one scorer, or one function of the configured reward, as JSON instead: `requires`
(the keys of `metadata` that it reads), `tasks` (all tasks of reasoning-gym, if the scorer is one of them) and `problem`
(why it cannot be used, or "").
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, BinaryIO

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.processes import end_with_parent, private_pipes
from mlx_parallm.rl.scoring import gym
from mlx_parallm.rl.scoring.functions import load_function
from mlx_parallm.rl.scoring.registry import BUILTINS, TooSlowError, cpu_limit, load_one
from mlx_parallm.rl.scoring.reward import RewardSpec, is_function, load
from mlx_parallm.rl.scoring.sample import ScorerError, ScorerInput

CHECK_S = 1.0
"""Processor time for one check."""

_NICE = 10
_MAX_ERROR = 300


def main() -> None:
    os.nice(_NICE)
    end_with_parent()
    requests, replies = private_pipes()
    if len(sys.argv) > 1:
        _reply(replies, describe(sys.argv[1]))
        return
    for line in requests:
        message = json.loads(line)
        if "check" in message:
            _check(message, replies)
        else:
            _score(message, replies)


def describe(name: str) -> dict[str, Any]:
    tasks: tuple[str, ...] = ()
    requires: list[str] = []
    try:
        if name.startswith(gym.PREFIX):
            tasks = gym.task_names()
        scorer = load_function(name) if is_function(name) else load_one(name)
        requires = [str(key) for key in getattr(scorer, "requires", ())]
        problem = "" if callable(scorer) else "it cannot be called"
    except (gym.UnusableTaskError, ScorerError) as error:
        problem = str(error)
    except BaseException as error:  # noqa: BLE001 - importing a user's package may raise anything
        problem = f"{type(error).__name__}: {error}"
    return {"requires": requires, "tasks": tasks, "problem": problem}


def _check(message: dict[str, Any], replies: BinaryIO) -> None:
    builtin = BUILTINS[message["check"]]
    builtin.load()
    _reply(replies, {"id": message["id"], "begun": True})
    refused = ""
    try:
        with cpu_limit(CHECK_S):
            if builtin.read is not None:
                builtin.read(message["metadata"])
    except InvalidRequestError as error:
        refused = str(error)
    except TooSlowError as error:
        refused = f"metadata.{builtin.key} is too complex: checking it {error}"
    _reply(replies, {"id": message["id"], "refused": refused})


def _score(group: dict[str, Any], replies: BinaryIO) -> None:
    try:
        reward = RewardSpec.from_json(group["reward"]) if "reward" in group else None
        scorer = load(group["scorer"], reward)
        _reply(replies, {"id": group["id"], "begun": True})
        given = scorer([ScorerInput(**sample) for sample in group["samples"]])
        rewards = [_finite(number, value) for number, value in enumerate(given, 1)]
    except ScorerError as error:
        _reply(replies, {"id": group["id"], "error": str(error)[:_MAX_ERROR]})
    except BaseException as error:  # noqa: BLE001 - a scorer may raise anything, even SystemExit: its group fails
        _reply(replies, {"id": group["id"], "error": f"{type(error).__name__}: {error}"[:_MAX_ERROR]})
    else:
        _reply(replies, {"id": group["id"], "rewards": rewards})


def _finite(number: int, reward: float | None) -> float:
    if reward is None:
        raise ScorerError(f"no reward applies to sample {number}: every function returned None")
    if not math.isfinite(reward):
        raise ValueError(f"gave {reward}; a reward must be a finite number")
    return reward


def _reply(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
