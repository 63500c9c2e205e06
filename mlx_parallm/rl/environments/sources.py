"""Environments of one answer: reasoning-gym, files of tasks, and tasks that the configured reward scores."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mlx_parallm.core import CollectionSpec
from mlx_parallm.rl.environments.protocol import Environment, EpisodeEnvironment, RolloutClient, Task, is_of_episodes
from mlx_parallm.rl.scoring import gym
from mlx_parallm.rl.scoring.scorers import REWARD
from mlx_parallm.rl.tasks import FileTask, FileTasks

_CHUNK = 50
"""Entries that are taken from one reasoning-gym data set before the next one is made. Few tasks have fewer."""


class ReasoningGym:
    """One reasoning-gym task with its default configuration: its question as the prompt, its own scoring."""

    def __init__(self, task: str) -> None:
        self._task = task

    def tasks(self, seed: int) -> Iterator[Task]:
        for chunk in itertools.count():
            # Entry i of a data set is drawn with the data set's seed + i, so nearby seeds would share entries.
            data = gym.dataset(self._task, seed=random.Random(f"{seed}/{chunk}").getrandbits(31))
            yield from map(self._from_entry, gym.entries(data, _CHUNK))

    def _from_entry(self, entry: dict[str, Any]) -> Task:
        plain = json.loads(json.dumps(entry, default=str))
        message = {"role": "user", "content": str(entry["question"])}
        return Task((message,), CollectionSpec(gym.PREFIX + self._task, {"entry": plain}))


class TasksOfFile:
    """The tasks of a file, each once before any comes again, in an order that depends on the seed."""

    def __init__(self, file: FileTasks) -> None:
        self._file = file

    def tasks(self, seed: int) -> Iterator[Task]:
        for epoch in itertools.count():
            order = random.Random(f"{seed}/{epoch}").sample(self._file.tasks, len(self._file.tasks))
            yield from map(_from_line, order)


def _from_line(task: FileTask) -> Task:
    text = task.prompt if isinstance(task.prompt, str) else ""
    return Task(task.messages, CollectionSpec(task.scorer, task.metadata, prompt_text=text), task.level)


class _Rewarded:
    """The tasks of another environment, scored by the configured reward."""

    def __init__(self, source: Environment) -> None:
        self._source = source
        if callable(examples := getattr(source, "examples", None)):
            self.examples = examples  # for a warm-up

    def tasks(self, seed: int) -> Iterator[Task]:
        return map(_rewarded, self._source.tasks(seed))


class _RewardedEpisodes(_Rewarded):
    """The rollouts of another environment. The configured reward scores their last answers."""

    def __init__(self, source: EpisodeEnvironment) -> None:
        super().__init__(source)
        self._rollout = source.rollout

    async def rollout(self, client: RolloutClient, task: Task) -> None:
        await self._rollout(client, task)


def rewarded_tasks(source: Environment) -> Environment:
    """The environment, with the configured reward in place of its own."""
    return _RewardedEpisodes(source) if is_of_episodes(source) else _Rewarded(source)


def _rewarded(task: Task) -> Task:
    return replace(task, collection=replace(task.collection, scorer=REWARD))
