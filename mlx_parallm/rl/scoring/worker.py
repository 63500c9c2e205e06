"""The scoring process: `python -m mlx_parallm.rl.scoring.worker`. It imports neither MLX nor a BLAS.

stdin:  {"id": 7, "scorer": "exact", "samples": [...], "reward": null}      one group; `reward`: a RewardSpec, if used
stdout: {"id": 7, "begun": true}                 the scorer is loaded: the group's time limit starts
        {"id": 7, "rewards": [1.0, 0.0]}  or  {"id": 7, "error": "..."}

stdin:  {"id": 8, "check": "regex", "metadata": {...}}                      can the scorer use this metadata?
stdout: {"id": 8, "begun": true}
        {"id": 8, "refused": ""}  or  {"id": 8, "refused": "metadata.pattern ..."}

With the argument NAME it describes one scorer, or one function of the operator's reward, as JSON instead: `requires`
(the keys of `metadata` that it reads), `tasks` (all tasks of reasoning-gym, if the scorer is one of them), `problem`
(why it cannot be used, or "") and `may_pass` (whether the machine may be what lacked something, such as memory).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.processes import end_with_parent, private_pipes
from mlx_parallm.rl.scoring import gym
from mlx_parallm.rl.scoring.builtin import BUILTINS, TooSlowError, cpu_limit
from mlx_parallm.rl.scoring.own_functions import load_function
from mlx_parallm.rl.scoring.sample import ScorerError, ScorerInput
from mlx_parallm.rl.scoring.scorers import RewardSpec, is_function, load, load_one

CHECK_S = 1.0
"""Processor time for one check."""

_NICE = 10
_MAX_ERROR = 300


def main() -> None:
    os.nice(_NICE)
    end_with_parent()
    requests, replies = private_pipes()

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    if len(sys.argv) > 1:
        reply(describe(sys.argv[1]))
        return
    for line in requests:
        message = json.loads(line)
        number = {"id": message["id"]}
        answer = _check if "check" in message else _score
        reply({**number, **answer(message, partial(reply, {**number, "begun": True}))})


def describe(name: str) -> dict[str, Any]:
    tasks: tuple[str, ...] = ()
    requires: list[str] = []
    may_pass = False
    try:
        if name.startswith(gym.PREFIX):
            tasks = gym.task_names()
        scorer = load_function(name) if is_function(name) else load_one(name)
        requires = [str(key) for key in getattr(scorer, "requires", ())]
        problem = "" if callable(scorer) else "it cannot be called"
    except BaseException as error:  # noqa: BLE001 - importing a user's package may raise anything
        problem, may_pass = _text(error), isinstance(error, OSError | MemoryError)
    return {"requires": requires, "tasks": tasks, "problem": problem, "may_pass": may_pass}


def _check(message: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    builtin = BUILTINS[message["check"]]
    builtin.load()
    begin()
    refused = ""
    try:
        with cpu_limit(CHECK_S):
            if builtin.read is not None:
                builtin.read(message["metadata"])
    except InvalidRequestError as error:
        refused = str(error)
    except TooSlowError as error:
        refused = f"metadata.{builtin.key} is too complex: checking it {error}"
    return {"refused": refused}


def _score(group: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    try:
        reward = RewardSpec.from_json(group["reward"]) if group["reward"] else None
        scorer = load(group["scorer"], reward)
        begin()
        rewards = scorer([ScorerInput(**sample) for sample in group["samples"]])
        return {"rewards": [_finite(number, value) for number, value in enumerate(rewards, 1)]}
    except BaseException as error:  # noqa: BLE001 - a scorer may raise anything, even SystemExit: its group fails
        return {"error": _text(error)[:_MAX_ERROR]}


def _finite(number: int, reward: float | None) -> float:
    if reward is None:
        raise ScorerError(f"no reward applies to sample {number}: every function returned None")
    if not math.isfinite(reward):
        raise ValueError(f"gave {reward}; a reward must be a finite number")
    return reward


def _text(error: BaseException) -> str:
    """What failed. Errors that are not ours may say little without their type."""
    return str(error) if isinstance(error, ScorerError) else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
