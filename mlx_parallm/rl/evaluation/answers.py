"""HeldOutAnswers: each held-out task is one request, and its answers are scored."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.core import (
    AdapterRef,
    CollectionSpec,
    EngineClient,
    GenerationRequest,
    SamplingParams,
    SequenceOutput,
    StopParams,
    WorkClass,
)
from mlx_parallm.rl.evaluation.evaluator import AnswerSettings, TaskResult
from mlx_parallm.rl.recording import TrajectoryRecorder
from mlx_parallm.rl.rollouts.answers import events_of
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
            # Sample j of a task is drawn with seed + j.
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
