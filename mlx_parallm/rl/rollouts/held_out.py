"""The held-out tasks of evaluations, and the tasks that are left to train on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator

from mlx_parallm.errors import ConfigError
from mlx_parallm.rl.environments import Environment, Task

_SEED = 2**31 - 1
"""Of the held-out tasks of an environment that makes tasks from a seed: the same tasks in every run."""

_LOOKS = 4
"""So many times the wanted number of tasks are looked at, because a file's tasks come again after the last one."""

_MOST_HELD_OUT = 10_000
"""Held-out tasks in a row, after which an environment is taken to have no others."""


def held_out_tasks(environment: Environment, size: int) -> tuple[Task, ...]:
    """`size` tasks with different messages, or fewer if the environment has no more.

    Raises:
        ConfigError: the environment has fewer than two.
    """
    tasks: dict[str, Task] = {}
    for task in itertools.islice(environment.tasks(_SEED), _LOOKS * size):
        tasks.setdefault(_messages_of(task), task)
        if len(tasks) == size:
            break
    if len(tasks) < 2:
        raise ConfigError("rl_training.evaluation.tasks: there must be two different tasks at least; add some")
    return tuple(tasks.values())


def without(tasks: Iterator[Task], held_out: Collection[Task]) -> Iterator[Task]:
    """The tasks whose messages are not those of a held-out task.

    Raises:
        ConfigError: in the iteration, if only held-out tasks come.
    """
    excluded, in_a_row = set(map(_messages_of, held_out)), 0
    for task in tasks:
        in_a_row = in_a_row + 1 if _messages_of(task) in excluded else 0
        if in_a_row > _MOST_HELD_OUT:
            raise ConfigError(
                f"environment: all of its tasks are among the {len(held_out)} that are held out for evaluations; give "
                "it more tasks, or lower --eval-size"
            )
        if not in_a_row:
            yield task


def _messages_of(task: Task) -> str:
    return json.dumps([dict(message) for message in task.messages], sort_keys=True, default=str)
