"""Groups of episodes: a task is done several times by the rollouts of its environment.

A group is collected as a whole when its last episode has ended, so what a process leaves behind when it ends is a group
or nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from mlx_parallm.core import AdapterRef, TextTokenizer, Trajectory
from mlx_parallm.errors import EngineDeadError, TrainingFailedError
from mlx_parallm.rl.environments import EpisodeEnvironment, RolloutError, Task
from mlx_parallm.rl.environments.thread import EnvironmentThread
from mlx_parallm.rl.rollouts.answers import DrawnTask, Generate, OnDrawn, RolloutSettings
from mlx_parallm.rl.rollouts.episode_client import EpisodeClient

CollectEpisodes = Callable[[Sequence[Trajectory], Mapping[str, float]], Awaitable[str]]
"""Keeps the turns of a group's episodes, with rewards by episode id. Returns why they will not be trained on, or ""."""

OWN_REWARD = "environment"
"""In place of a scorer's name, for tasks that name none: the environment gives the rewards."""


class Episodes:
    """Draws groups of episodes. Event loop's thread only.

    Args:
        generate: answers a request without collecting it.
        collect: gets each group once, when all its episodes have ended.
    """

    def __init__(
        self,
        environment: EpisodeEnvironment,
        thread: EnvironmentThread,
        generate: Generate,
        collect: CollectEpisodes,
        tokenizer: TextTokenizer,
        settings: RolloutSettings,
        on_drawn: OnDrawn = lambda _, __: None,
    ) -> None:
        self._environment, self._thread = environment, thread
        self._generate, self._collect = generate, collect
        self._tokenizer, self._settings = tokenizer, settings
        self._on_drawn = on_drawn

    async def draw(self, number: int, task: Task, adapter: AdapterRef) -> DrawnTask:
        """Does a task `group_size` times with one version. An episode that fails does not stop the others.

        Raises:
            EngineDeadError: the device thread has stopped.
            TrainingFailedError: all episodes failed; the message is that of the first one.
        """
        if task.collection.scorer is None:
            task = replace(task, collection=replace(task.collection, scorer=OWN_REWARD))
        clients = [
            EpisodeClient(self._generate, self._tokenizer, self._settings, adapter, task, number, episode)
            for episode in range(self._settings.group_size)
        ]
        ended = await asyncio.gather(*(self._run(client, number, task) for client in clients), return_exceptions=True)
        failures = [result for result in ended if isinstance(result, BaseException)]
        for failure in failures:
            if isinstance(failure, EngineDeadError) or not isinstance(failure, Exception):
                raise failure
        done = [
            (client, reward)
            for client, reward in zip(clients, ended, strict=True)
            if not isinstance(reward, BaseException)
        ]
        if not done:
            raise TrainingFailedError(_text(failures[0]))
        turns = [turn for client, _ in done for turn in client.turns]
        rewards = {client.episode_id: reward for client, reward in done if reward is not None}
        fault = await self._collect(turns, rewards)
        if failures:
            fault = f"{len(failures)} of {len(clients)} episodes failed, the first with: {_text(failures[0])}"
        return DrawnTask(sum(len(turn.completion_ids) for turn in turns), fault)

    async def _run(self, client: EpisodeClient, number: int, task: Task) -> float | None:
        reward = await play(self._environment, self._thread, client, task)
        self._on_drawn(number, 1)
        return reward


async def play(
    environment: EpisodeEnvironment, thread: EnvironmentThread, client: EpisodeClient, task: Task
) -> float | None:
    """Does a task once. The turns are in `client` afterwards.

    Returns:
        The reward; None leaves it to the scoring function of the task.

    Raises:
        RolloutError: the episode has failed: it took too long, for example.
        Exception: what the environment raises.
    """
    try:
        reward = await thread.run(lambda: environment.rollout(client, task), client.left_s)
    finally:
        client.end()
    if not client.turns:
        raise RolloutError("the environment ended without asking the model")
    if reward is None:
        if task.collection.scorer in (None, OWN_REWARD):
            raise RolloutError("the environment gave no reward, and the task names no scoring function")
        return None
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RolloutError(f"the reward must be a finite number or None, got {reward!r:.100}")
    return float(reward)


def _text(error: BaseException) -> str:
    """A line for people. Errors of an environment may say little without their type."""
    text = str(error)
    return text if isinstance(error, RolloutError) and text else f"{type(error).__name__}: {text}"
