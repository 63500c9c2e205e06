"""Lesson: one lesson while it runs. It draws the answers to its prompts, and takes note of their rewards."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mlx_parallm.app.build import Served
from mlx_parallm.app.rollout_driver import RolloutDriver
from mlx_parallm.config import Config
from mlx_parallm.core import (
    BASE_ADAPTER,
    CheckpointCard,
    LessonAnswer,
    LessonCard,
    LessonOutcome,
    LessonShowing,
    LessonSpec,
    Signal,
    TrainingEvent,
)
from mlx_parallm.rl.collect.groups import DropReason
from mlx_parallm.rl.lessons.examples import batches_of, can_be_shown, examples_of, request_for
from mlx_parallm.rl.lessons.progress import LessonProgress
from mlx_parallm.rl.lessons.record import new_id
from mlx_parallm.rl.lessons.rules import answers_per_update, tasks_of
from mlx_parallm.rl.rollouts.answers import DrawResult, Rollouts, RolloutSettings, group_prefixes, task_number
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.tasks import spawn

_log = logging.getLogger(__name__)


class Lesson:
    """Draws answers until it is closed. Event loop's thread only.

    Attributes:
        adapter: the name of the adapter that learns.
        prefix: the ids of its groups begin with it.
        progress: what it has taught so far.

    Args:
        checkpoint: of the adapter as it was before.
        fault: why the last group that could not be scored failed.
        is_held_back: whether nothing should be drawn now, for a reason that is not training's.
        on_change: called when an update was made, and when the lesson should end.
    """

    quiet_s = 0.0
    """Its rewards come at once, or from a judge on the same device, so nothing is gained by drawing ahead."""

    def __init__(
        self,
        spec: LessonSpec,
        adapter: str,
        config: Config,
        served: Served,
        service: TrainingService,
        checkpoint: CheckpointCard,
        fault: Callable[[], str],
        is_held_back: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        self.adapter = adapter
        self._id, self._started = new_id(), time.time()
        self.prefix = group_prefixes(self._id)[0]
        self._spec, self._service, self._checkpoint = spec, service, checkpoint
        self._fault, self._on_change = fault, on_change
        self._needs = service.needs(adapter)
        self._examples: asyncio.Task[None] | None = None
        self._per_update = answers_per_update(spec)
        self.progress = LessonProgress(len(spec.prompts), self._per_update, spec.updates)
        training = config.rl_training
        settings = RolloutSettings(spec.group_size, spec.max_tokens, spec.temperature, seed=training.seed, run=self._id)
        tasks = tasks_of(spec)
        self._rollouts = Rollouts(served.generate, served.adapters, served.tokenizer, tasks, settings)

        self._draw_examples = partial(
            examples_of,
            spec,
            request_for(spec, self._id, training.seed),
            served.generate,
            served.tokenizer,
        )

        def is_paused() -> bool:
            return self.progress.showing is not None or is_held_back() or self._needs.pause_reason is not None

        rows = config.server.max_batch_size
        self._driver = RolloutDriver(self, self._needs, training, spec.group_size, rows, is_paused)

    def start(self) -> None:
        self._driver.start()

    async def close(self) -> None:
        """Ends all drawing. What was not finished is not collected."""
        if self._examples is not None:
            self._examples.cancel()
            await asyncio.gather(self._examples, return_exceptions=True)
        await self._driver.close()

    async def draw(self, groups: int) -> DrawResult:
        """See `rollout_driver.Source`."""
        live = self._needs.live
        try:
            drawn = await self._rollouts.draw(groups, BASE_ADAPTER.name if live == BASE_ADAPTER else str(live))
        except Exception as error:  # whatever it is, the lesson says why it ended; the driver logs it
            self._failed(str(error) or type(error).__name__, for_good=True)
            raise
        for failure in drawn.failures:
            self._failed(failure)
        return drawn

    def on_event(self, event: TrainingEvent) -> None:
        """Takes note of an event of training."""
        data = event.data
        if data.get("adapter") != self.adapter:
            return
        group = str(data.get("group_id", ""))
        if event.kind == "update":
            self.progress.updated()
            self._on_change()
        elif not group.startswith(self.prefix):
            return
        elif event.kind == "scored" and data.get("complete"):
            answers = [LessonAnswer(text, reward) for text, reward in self._service.trajectories.answers(group)]
            self.progress.scored(task_number(group, self._id), answers)
            self._look()
            if self._examples is None and self.progress.needs_examples and can_be_shown(self._spec):
                self.progress.showing = LessonShowing()
                self._examples = spawn(self._show(), _log, "showing examples of a lesson")
        elif event.kind == "dropped" and DropReason.SCORING_FAILED.value in data.get("reasons", {}):
            self._failed(self._fault())

    def card(self) -> LessonCard:
        progress, live = self.progress, self._needs.live
        return LessonCard(
            lesson_id=self._id,
            spec=self._spec,
            state=self._state,
            adapter=self.adapter,
            live="" if live == BASE_ADAPTER else str(live),
            per_update=self._per_update,
            checkpoint=self._checkpoint.name,
            updates=progress.updates,
            examples=progress.examples,
            points=progress.points,
            samples=progress.samples,
            outcome=progress.outcome,
            reason=progress.reason or self._needs.pause_reason or "",
            advice=progress.advice,
            started=self._started,
            ended=None if progress.outcome is None else time.time(),
            showing=progress.showing if progress.outcome is None else None,
        )

    @property
    def _state(self) -> str:
        if self.progress.outcome is not None:
            return "ended"
        return "showing" if self.progress.showing is not None else self._driver.state

    async def _show(self) -> None:
        """Has the adapter imitate answers that meet the rule. Meanwhile nothing else is drawn."""
        progress, loss = self.progress, None
        try:
            with self._service.imitating(self.adapter):
                for showing, batch in batches_of(await self._draw_examples()):
                    progress.showing = replace(showing, loss=loss)
                    report = await self._service.update(self.adapter, batch, signal=Signal.CORRECTIONS)
                    loss = report.metrics.get("loss")
                    if report.status == "published":
                        progress.examples = max(progress.examples, showing.number)
            if progress.examples:
                progress.shown()
            progress.showing = None  # not if it is cancelled: then nothing is known of what the examples would do
        except Exception as error:  # noqa: BLE001 - whatever failed, the server goes on, and the lesson says why it ended
            self._failed(str(error) or type(error).__name__, for_good=True)

    def _failed(self, reason: str, for_good: bool = False) -> None:
        if for_good:
            self.progress.end(LessonOutcome.FAILED, reason)
        else:
            self.progress.failed(reason)
        self._look()

    def _look(self) -> None:
        if self.progress.outcome is not None:
            self._on_change()
