"""Environments: endless tasks with rewards, for training that no client drives."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from mlx_parallm.adapters.names import shown
from mlx_parallm.core import Collection
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl.scoring import gym

GROUP = "mlx_parallm.environments"
"""Entry points of a user's package: name = "module:object", an Environment or a class of one."""

_CHUNK = 50
"""Entries of one data set: few tasks of reasoning-gym have fewer to give."""


@dataclass(frozen=True, slots=True)
class Task:
    """A conversation to be continued (`role` and `content` each), and how the answers are scored."""

    messages: tuple[Mapping[str, str], ...]
    collection: Collection


class Environment(Protocol):
    def tasks(self, seed: int) -> Iterator[Task]:
        """Endless; equal seeds give equal tasks, and other seeds others, as far as the environment has others."""
        ...


class ReasoningGym:
    """One task of reasoning-gym, with its default configuration: the question as it is, scored by the task itself."""

    def __init__(self, task: str) -> None:
        self._task = task

    def tasks(self, seed: int) -> Iterator[Task]:
        for chunk in itertools.count():
            # An entry is drawn with its data set's seed + its index: seeds close to each other would share entries.
            data = gym.dataset(self._task, seed=random.Random(f"{seed}/{chunk}").getrandbits(31))
            yield from map(self._posed, gym.entries(data, _CHUNK))

    def _posed(self, entry: dict[str, Any]) -> Task:
        plain = json.loads(json.dumps(entry, default=str))
        message = {"role": "user", "content": str(entry["question"])}
        return Task((message,), Collection(gym.PREFIX + self._task, {"entry": plain}))


def environment(name: str) -> Environment:
    """`reasoning_gym:<task>`, or an entry point's name. The first may take seconds: it imports reasoning-gym.

    Raises:
        ConfigError: unknown, not installed, or it cannot be loaded.
    """
    if name.startswith(gym.PREFIX):
        return _reasoning_gym(name)
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        raise _unknown(name, [*points, gym.PREFIX + "<task>"])
    return _loaded(points[name])


def _reasoning_gym(name: str) -> Environment:
    if not gym.installed():
        raise ConfigError(f"environment: {gym.NOT_INSTALLED}")
    tasks = gym.task_names()
    task = name.removeprefix(gym.PREFIX)
    if task not in tasks:
        raise _unknown(name, [gym.PREFIX + known for known in tasks])
    return ReasoningGym(task)


def _loaded(point: EntryPoint) -> Environment:
    try:
        found = point.load()
        made: Environment = found() if isinstance(found, type) else found
    except Exception as error:  # code of somebody else is loaded, which may raise anything
        raise ConfigError(f"environment: {point.name} ({point.value}) cannot be loaded: {error}") from error
    if not callable(getattr(made, "tasks", None)):
        raise ConfigError(f"environment: {point.name} ({point.value}) has no method tasks(seed)")
    return made


def _unknown(name: str, known: list[str]) -> ConfigError:
    near = get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known)[:20])}"
    return ConfigError(f"environment: {shown(name)} is unknown: {hint}")
