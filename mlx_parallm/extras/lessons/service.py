"""Lessons: what clients teach the server while it runs, one lesson at a time.

    prompts, rule ─▶ Lesson ─▶ RolloutDriver ─▶ engine ─▶ trajectory buffer ─▶ AdapterRun, at the lesson's pace
                       ▲                                        │
                       └──────────── rewards, updates ──────────┘

A lesson is noted in the run's folder when it begins, after each update and when it ends. After a crash its updates are
made again from the journal, as all others are, and the lesson counts as interrupted. Its answers that no update took
are dropped, as when it is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.app.build import Served
from mlx_parallm.config import Config
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.readers import Reader
from mlx_parallm.core.requests import Signal
from mlx_parallm.errors import ConflictError, ContextLengthError, InvalidRequestError
from mlx_parallm.extras.lessons.cards import (
    LessonAnswer,
    LessonCard,
    LessonOutcome,
    LessonShowing,
    LessonSpec,
    LessonState,
    RuleKind,
)
from mlx_parallm.extras.lessons.examples import batches_of, can_be_shown, examples_of, imitating, request_for
from mlx_parallm.extras.lessons.progress import LessonProgress
from mlx_parallm.extras.lessons.record import interrupted, new_id, read_lesson, write_lesson
from mlx_parallm.extras.lessons.rules import answers_per_update, collection_of, tasks_of
from mlx_parallm.rl.rollouts.answers import RolloutResult, Rollouts, RolloutSettings, group_prefixes, task_number
from mlx_parallm.rl.rollouts.driver import RolloutDriver
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.status import TrainingEvent
from mlx_parallm.rl.trajectories import DropReason
from mlx_parallm.rl.updates.adapter_training import Pace
from mlx_parallm.tasks import spawn


class Lesson:
    """Samples answers until it is closed. Event loop's thread only.

    Attributes:
        adapter: the name of the adapter that learns.
        prefix: the ids of its groups begin with it.
        progress: what it has taught so far.

    Args:
        key: the name of the API key that gives it.
        checkpoint: of the adapter as it was before.
        fault: why the last group that could not be scored failed.
        is_held_back: whether nothing should be sampled now, for a reason that is not training's.
        on_change: called when an update was made, and when the lesson should end.
    """

    quiet_s = 0.0
    """Its rewards come at once, or from a judge on the same device, so nothing is gained by sampling ahead."""

    def __init__(
        self,
        spec: LessonSpec,
        adapter: str,
        key: str,
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
        self._spec, self._key, self._service, self._checkpoint = spec, key, service, checkpoint
        self._fault, self._on_change = fault, on_change
        self._loop = service.loop(adapter)
        self._examples: asyncio.Task[None] | None = None
        self._per_update = answers_per_update(spec)
        self.progress = LessonProgress(spec.prompts, self._per_update, spec.updates)
        training = config.rl_training
        settings = RolloutSettings(
            spec.group_size, spec.max_tokens, spec.temperature, seed=training.seed, run=self._id, key=key
        )
        tasks = tasks_of(spec)
        self._rollouts = Rollouts(served.generate, served.adapters, served.tokenizer, tasks, settings)

        self._draw_examples = partial(
            examples_of,
            spec,
            request_for(spec, self._id, training.seed, key),
            served.generate,
            served.tokenizer,
        )

        def is_paused() -> bool:
            return self.progress.showing is not None or is_held_back() or self._loop.pause_reason is not None

        def in_scoring() -> int:
            return service.trajectories.groups.in_scoring

        rows = config.server.max_batch_size
        self._driver = RolloutDriver(self, self._loop, in_scoring, training, spec.group_size, rows, is_paused)

    def start(self) -> None:
        self._driver.start()

    async def close(self) -> None:
        """Ends all sampling. What was not finished is not collected."""
        if self._examples is not None:
            self._examples.cancel()
            await asyncio.gather(self._examples, return_exceptions=True)
        await self._driver.close()

    async def sample(self, groups: int) -> RolloutResult:
        """See `GroupSource.sample`."""
        live = self._loop.live
        try:
            drawn = await self._rollouts.sample(groups, BASE_ADAPTER.name if live == BASE_ADAPTER else str(live))
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
            found = self._service.trajectories.buffer.find(group, self._key)
            answers = [
                LessonAnswer(member.trajectory.text, member.reward)
                for member in (found.members if found is not None else ())
                if member.reward is not None
            ]
            self.progress.scored(task_number(group, self._id), answers)
            self._look()
            if self._examples is None and self.progress.needs_examples and can_be_shown(self._spec):
                self.progress.showing = LessonShowing()
                self._examples = spawn(self._show(), _log, "showing examples of a lesson")
        elif event.kind == "dropped" and DropReason.SCORING_FAILED.value in data.get("reasons", {}):
            self._failed(self._fault())

    def card(self) -> LessonCard:
        spec, progress, live = self._spec, self.progress, self._loop.live
        return LessonCard(
            id=self._id,
            adapter=self.adapter,
            live_lora=None if live == BASE_ADAPTER else str(live),
            checkpoint=self._checkpoint.name,
            reward={spec.rule.kind.value: spec.rule.text},
            max_tokens=spec.max_tokens,
            group_size=spec.group_size,
            temperature=spec.temperature,
            learning_rate=spec.learning_rate,
            answers_per_update=self._per_update,
            most_updates=spec.updates,
            prompts=progress.prompts,
            started=self._started,
            state=self._state,
            updates=progress.updates,
            examples=progress.examples,
            points=progress.points,
            showing=progress.showing if progress.outcome is None else None,
            outcome=progress.outcome,
            reason=progress.reason or self._loop.pause_reason or "",
            advice=progress.advice,
            ended=None if progress.outcome is None else time.time(),
        )

    @property
    def _state(self) -> LessonState:
        if self.progress.outcome is not None:
            return "ended"
        return "showing" if self.progress.showing is not None else self._driver.state

    async def _show(self) -> None:
        """Has the adapter imitate answers that meet the rule. Meanwhile nothing else is sampled."""
        progress, loss = self.progress, None
        try:
            with imitating(self._service, self.adapter):
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


TAG = "before-lesson"
"""Of the checkpoint of an adapter as it was before its last lesson."""

_log = logging.getLogger(__name__)


class Lessons:
    """Event loop's thread only."""

    def __init__(self, config: Config, served: Served, training: TrainingService) -> None:
        assert served.run is not None  # a server that trains keeps checkpoints
        self._config, self._served = config, served
        self._service, self._folder = training, served.run.path
        self._lesson: Lesson | None = None
        self._last = read_lesson(self._folder)
        if self._last is not None and self._last.outcome is LessonOutcome.INTERRUPTED:
            cut = "the last lesson, of %s, was cut off after %d updates by the end of the server, and does not go on"
            _log.info(cut, self._last.adapter, self._last.updates)
        self._changing, self._writing = asyncio.Lock(), asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._service.add_sink(self._on_event)
        self._service.hooks.forgotten.append(self._forget)

    # -- what clients ask for --------------------------------------------------------------------

    def obstacle(self) -> str:
        training = self._config.rl_training
        if training.own_environment is None or not training.server_rollouts:
            return ""
        return (
            f"This server draws rollouts of its environment {training.own_environment} by itself; start it with "
            "--no-server-rollouts to give it lessons."
        )

    def card(self, reader: Reader) -> LessonCard | None:
        card = self._last if self._lesson is None else self._lesson.card()
        return card if card is not None and reader.sees(card.adapter) else None

    async def start(self, spec: LessonSpec, reader: Reader) -> LessonCard:
        adapter = reader.named(spec.adapter, self._service.default_adapter)
        async with self._changing:
            if obstacle := self.obstacle():
                raise ConflictError(obstacle)
            if self._lesson is not None:
                raise ConflictError(
                    "A lesson runs, and there is one at a time. Wait for its end, or stop it with DELETE "
                    "/v1/training/lesson if it is for an adapter of yours."
                )
            await self._check(spec)
            lesson = await self._begun(spec, adapter, reader.name)
            if self._closed:  # meanwhile
                raise ConflictError("The server is ending.")
            self._lesson = lesson
            self._lesson.start()
            await self._note(card := self._lesson.card())
            self._service.emit("lesson_started", adapter=card.adapter, lesson=card.id)
            return card

    async def stop(self, reader: Reader) -> LessonCard:
        async with self._changing:
            if self._lesson is None or not reader.sees(self._lesson.adapter):
                raise ConflictError("No lesson runs.")
            self._lesson.progress.end(LessonOutcome.STOPPED, "it was stopped")
            return await self._end(self._lesson)

    def _forget(self, adapter: str) -> None:
        """Forgets the last lesson if it was for this adapter."""
        if self._last is not None and self._last.adapter == adapter:
            self._last = None

    async def close(self) -> None:
        """Ends the lesson that runs, before training ends."""
        self._closed = True
        for task in tuple(self._tasks):
            task.cancel()  # one may wait until an update is made, which training gives up when it ends
        await asyncio.gather(*self._tasks, return_exceptions=True)
        lesson, self._lesson = self._lesson, None
        if lesson is not None:
            await lesson.close()
            self._last = interrupted(lesson.card())
            cut = "the lesson of %s was cut off after %d updates; what it has taught is kept, and it does not go on"
            _log.info(cut, lesson.adapter, self._last.updates)
            await self._note(self._last)

    # -- beginning -------------------------------------------------------------------------------

    async def _check(self, spec: LessonSpec) -> None:
        """Raises what `start` does about the lesson itself."""
        most, wanted = self._config.rl_training.trajectory_buffer_size, answers_per_update(spec)
        if wanted > most:
            raise InvalidRequestError(
                f"{wanted} answers make an update of this lesson, and rl_training.trajectory_buffer_size is {most}: "
                "send fewer prompts, or a smaller group_size",
                "prompts",
            )
        await asyncio.to_thread(self._check_prompts, spec)
        if spec.rule.kind is not RuleKind.JUDGE:
            try:
                await self._service.parts.scorers.check(collection_of(spec.rule))
            except InvalidRequestError as error:
                message = str(error).removeprefix("metadata.pattern")
                raise InvalidRequestError(f"reward.{spec.rule.kind}{message}", f"reward.{spec.rule.kind}") from error

    def _check_prompts(self, spec: LessonSpec) -> None:
        context, tokenizer = self._served.card.context_length, self._served.tokenizer
        if tokenizer.chat_template is None:
            raise InvalidRequestError("prompts: this model has no chat template, so it takes no lessons", "prompts")
        for number, messages in enumerate(spec.prompts):
            tokens = len(tokenizer.apply_chat_template(messages, at_most=context)) + spec.max_tokens
            if tokens > context:
                raise ContextLengthError(
                    f"prompts[{number}] and max_tokens are {tokens} tokens, and this model's context is {context}.",
                    f"prompts[{number}]",
                )

    async def _begun(self, spec: LessonSpec, adapter: str, key: str) -> Lesson:
        pace = Pace(answers_per_update(spec), spec.learning_rate)
        await self._service.start(adapter)
        self._service.check_changeable(adapter)
        checkpoint = await self._service.changes.finished(self._service.loop(adapter).begin_lesson(pace, TAG))
        return Lesson(
            spec,
            adapter,
            key,
            self._config,
            self._served,
            self._service,
            checkpoint,
            lambda: self._service.parts.scorers.last_fault,
            lambda: self._service.is_asleep() or self._served.engine.stats().paused,
            self._on_change,
        )

    # -- going on and ending ---------------------------------------------------------------------

    def _on_event(self, event: TrainingEvent) -> None:
        if self._lesson is not None:
            self._lesson.on_event(event)

    def _on_change(self) -> None:
        """An update of the lesson was made, or it should end."""
        lesson = self._lesson
        if lesson is None:
            return
        ends = lesson.progress.outcome is not None
        self._spawn(self._end_if_running(lesson) if ends else self._note(lesson.card()))

    async def _end_if_running(self, lesson: Lesson) -> None:
        async with self._changing:
            if lesson is self._lesson:
                await self._end(lesson)

    async def _end(self, lesson: Lesson) -> LessonCard:
        await lesson.close()
        self._last, self._lesson = lesson.card(), None
        await self._note(self._last)
        self._service.trajectories.buffer.drop_own(lesson.adapter, lesson.prefix, DropReason.STOPPED)
        await self._service.changes.finished(self._service.loop(lesson.adapter).end_lesson())
        outcome = str(self._last.outcome)
        self._service.emit("lesson_ended", adapter=lesson.adapter, lesson=self._last.id, outcome=outcome)
        return self._last

    async def _note(self, card: LessonCard) -> None:
        """Writes the lesson into its file."""
        async with self._writing:
            await asyncio.to_thread(partial(write_lesson, self._folder, card))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = spawn(work, _log, "a change of a lesson")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def serve(config: Config, served: Served, training: TrainingService) -> Lessons:
    """What requests for lessons ask. The running lesson ends before training does."""
    lessons = Lessons(config, served, training)
    training.hooks.ending.append(lessons.close)
    return lessons
