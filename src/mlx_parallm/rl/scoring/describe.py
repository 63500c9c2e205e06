"""What the server must know of a scorer that it does not import: `python -m mlx_parallm.rl.scoring.describe <name>`.

Says on stdout, as JSON: `requires` (keys of `metadata`), `tasks` (reasoning-gym's, where the name is one of its own),
`problem` (why the scorer cannot be used, or "").
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from mlx_parallm.children.pipes import private_pipes
from mlx_parallm.children.watch import end_with_parent
from mlx_parallm.rl.scoring import gym
from mlx_parallm.rl.scoring.registry import load_one

_NICE = 10


def main() -> None:
    os.nice(_NICE)
    end_with_parent()
    _, replies = private_pipes()
    replies.write(json.dumps(describe(sys.argv[1])).encode())
    replies.flush()


def describe(name: str) -> dict[str, Any]:
    tasks: tuple[str, ...] = ()
    try:
        if name.startswith(gym.PREFIX):
            tasks = gym.task_names()
        scorer = load_one(name)
        requires = [str(key) for key in getattr(scorer, "requires", ())]
        problem = "" if callable(scorer) else "it cannot be called"
    except gym.UnusableTaskError as error:
        return {"requires": [], "tasks": tasks, "problem": str(error)}
    except BaseException as error:  # noqa: BLE001 - importing a user's package may raise anything
        return {"requires": [], "tasks": tasks, "problem": f"{type(error).__name__}: {error}"}
    return {"requires": requires, "tasks": tasks, "problem": problem}


if __name__ == "__main__":
    main()
