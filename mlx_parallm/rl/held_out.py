"""Held-out tasks, and how a version does them: each is one request, or an environment's own rollout plays it."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.core.requests import (
    CollectionSpec,
    GenerationRequest,
    SamplingParams,
    SequenceOutput,
    StopParams,
    WorkClass,
)
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.rl.environments import Task
from mlx_parallm.rl.evaluation import AnswerSettings, TaskResult
from mlx_parallm.rl.recording import TrajectoryRecorder
from mlx_parallm.rl.rollouts.answers import RolloutSettings, all_ended, events_of
from mlx_parallm.rl.rollouts.episodes import EpisodeClient
from mlx_parallm.rl.scoring.service import ScoringService


@dataclass(frozen=True, slots=True)
class HeldOutTask:
    """The token ids of a held-out prompt, and how its answers are scored."""

    prompt_ids: tuple[int, ...]
    collection: CollectionSpec


class HeldOutAnswers:
    """Implements `HeldOut`.

    Args:
        reward: what rewards depend on besides the tasks, as text.
    """

    def __init__(
        self,
        engine: EngineClient,
        scorers: ScoringService,
        tasks: Sequence[HeldOutTask],
        settings: AnswerSettings,
        reward: str = "",
    ) -> None:
        self.settings, self.size = settings, len(tasks)
        self.identity = repr((tuple(tasks), settings, reward))
        self._engine, self._scorers, self._tasks = engine, scorers, tasks
        self._numbers = itertools.count()

    async def do(self, version: AdapterRef, number: int) -> TaskResult:
        """Asks for all answers with one request."""
        settings, task = self.settings, self._tasks[number]
        request = GenerationRequest(
            request_id=f"eval-{next(self._numbers)}",
            prompts=(task.prompt_ids,),
            # Sample j of a task has the seed + j.
            sampling=SamplingParams(temperature=settings.temperature, seed=number * settings.samples),
            stopping=StopParams(settings.max_tokens),
            n=settings.samples,
            adapter=version,
            work_class=WorkClass.TRAINING,
            collection=task.collection,
        )
        recorder = TrajectoryRecorder(request)
        async for event in events_of(self._engine.generate(request)):
            if isinstance(event, SequenceOutput):
                recorder.add(event)
        (group,) = recorder.groups()
        return TaskResult(await self._scorers.score(group))


Play = Callable[[EpisodeClient, Task], Awaitable[float | None]]


class HeldOutEpisodes:
    """Implements `HeldOut`. Event loop's thread only.

    Args:
        play: does a task once with a client; see `rollouts.episodes.play`.
        timeout_s: the longest time that an episode may take besides the model's answers.
        reward: what rewards depend on besides the tasks, as text.
    """

    def __init__(
        self,
        play: Play,
        engine: EngineClient,
        tokenizer: TextTokenizer,
        scorers: ScoringService,
        tasks: Sequence[Task],
        settings: AnswerSettings,
        timeout_s: float,
        reward: str = "",
    ) -> None:
        self.settings, self.size = settings, len(tasks)
        self.identity = repr(([(task.messages, task.collection) for task in tasks], settings, reward))
        self._play = play
        self._engine, self._tokenizer = engine, tokenizer
        self._scorers, self._tasks = scorers, tasks
        self._timeout_s = timeout_s
        self._numbers = itertools.count()

    async def do(self, version: AdapterRef, number: int) -> TaskResult:
        """Plays all episodes of the task at the same time. One that fails does not stop the others."""
        task, samples = self._tasks[number], self.settings.samples
        settings = RolloutSettings(
            samples,
            self.settings.max_tokens,
            self.settings.temperature,
            run=f"eval-{next(self._numbers)}",
            timeout_s=self._timeout_s,
        )
        clients = [
            EpisodeClient(self._engine.generate, self._tokenizer, settings, version, task, number, episode)
            for episode in range(samples)
        ]
        rewards = await all_ended(self._reward(client, task) for client in clients)
        fault = next((reward for reward in rewards if isinstance(reward, Exception)), None)
        return TaskResult(tuple(reward for reward in rewards if isinstance(reward, float)), fault)

    async def _reward(self, client: EpisodeClient, task: Task) -> float:
        """The reward of one episode: the environment's, or that of the scoring function for its last answer."""
        reward = await self._play(client, task)
        if reward is None:
            (reward,) = await self._scorers.score(client.turns[-1:])
        return reward
