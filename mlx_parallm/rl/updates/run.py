"""AdapterRun: trains one adapter. It decides when an update is made, of what, and what follows from it.

    buffer ─▶ select ─▶ learn ─▶ gate ─▶ stage ─▶ evaluate ─▶ flip ─▶ record ─▶ respond ─▶ evaluate, save
              │         └─────────── AdapterTraining.learn ──────┘     │          │
              GroupSelection                                           │          a divergence pauses or rolls back
                                                                       PolicyJournal

`AdapterRun._update_of` and `AdapterTraining.learn` are that line, one call after the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace
from typing import TypeVar

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.config import Action, ResolvedTraining
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import Signal
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import EngineDeadError, InvalidRequestError, StorageError
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.objectives import Advantages, PreparedUpdate, ScoredGroup, loss_of, signal_of
from mlx_parallm.rl.recording import check_loss, given_groups
from mlx_parallm.rl.runs.records import CHANGED
from mlx_parallm.rl.sources import SourceLedger, sources_of
from mlx_parallm.rl.status import Divergence, EvaluationResult, TrainingStatus, UpdateReport
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup, TrajectoryState
from mlx_parallm.rl.updates.adapter_training import AdapterTraining, Pace
from mlx_parallm.rl.updates.recovery import PolicyJournal
from mlx_parallm.rl.updates.reports import Pausing
from mlx_parallm.rl.updates.selection import Chosen, GroupSelection
from mlx_parallm.train.advantages import GroupAdvantages
from mlx_parallm.train.data import PLACEHOLDERS, Datum
from mlx_parallm.train.jobs import NO_GRADIENT

UNTAUGHT_S = 10.0
"""Pause after an update for which the teacher scored nothing. The same trajectories are then tried again."""

_AFTER_FAILURE_S = 1.0
"""Pause after a failure while updates are paused already."""

_DROP_REASONS = {"published": None, "trained": None, "held": DropReason.HELD, "skipped": DropReason.SKIPPED}
"""Why the trajectories of an update are dropped, by the status of its report. None: they were trained on."""

_MAX_NAMED_GROUPS = 128
"""The most groups that the event of an update's beginning names."""

_VERSIONS_SHOWN = 8

T = TypeVar("T")

_log = logging.getLogger(__name__)


def _any(_: str) -> bool:
    return True


class AdapterRun:
    """Updates one adapter: on request, and whenever enough trajectories are ready. One lock orders all changes.

    Every group that is taken from the buffer is ended, whatever becomes of its update. If an update was skipped, held
    or failed, its trajectories are dropped, since another attempt would end the same way. If it was cancelled, because
    the process ends, or if the teacher scored none of its samples, they wait again.

    Attributes:
        held: whether automatic updates wait, because two versions are being compared.
        entry: makes the block in which each automatic update is made.
        own_progress: what updates note as their progress if they are given none; None: nothing.
    """

    def __init__(
        self,
        training: AdapterTraining,
        buffer: TrajectoryBuffer,
        config: ResolvedTraining,
        emit: Emit,
        ledger: SourceLedger | None = None,
    ) -> None:
        self.training = training
        self.held = False
        self.entry: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        self.own_progress: Callable[[], Mapping[str, float] | None] = lambda: None
        self._buffer = buffer
        self._config = config
        self._emit = emit
        self._ledger = ledger or SourceLedger()
        self._selection = GroupSelection(training, buffer, config)
        self._changes = PolicyJournal(training, config)
        self._pausing = Pausing(training.name, emit, config.max_skips)
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._warned = False  # of placeholders

    @property
    def name(self) -> str:
        return self.training.name

    # -- automatic updates -----------------------------------------------------------------------

    async def run(self) -> None:
        """Makes updates and checkpoints when they are due. Returns only when the device thread has ended. Whatever else
        fails is logged, reported and tried again; after `max_skips` failures in a row, or if the disk fails, updates
        pause."""
        while True:
            was_paused = self._pausing.reason is not None
            try:
                await self._wait()
                await self._catch_up()
            except EngineDeadError as error:
                _log.error("no more updates of %s: %s", self.name, error)
                return
            except Exception as error:  # noqa: BLE001 - without this loop, nothing would ever be learnt again
                _log.exception("an update of %s failed", self.name)
                self._failed(error)
                if isinstance(error, StorageError):
                    self.pause(str(error))
                if was_paused:  # so it was no update that failed, and may fail at once again
                    await asyncio.sleep(_AFTER_FAILURE_S)
                self._changed.set()

    async def _wait(self) -> None:
        """Waits until something has changed, or a checkpoint is due."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.training.checkpoints.unsaved.due_in):
                await self._changed.wait()
        self._changed.clear()

    async def _catch_up(self) -> None:
        """Makes the updates and the checkpoint that are due."""
        while self._due:
            untaught = False
            async with self.entry(), self._lock:
                if self._due:  # still true, so no other update has taken the trajectories
                    await self._changes.flush()
                    untaught = (await self._update_on(self._selection.take())).given_back
            if untaught:
                await asyncio.sleep(UNTAUGHT_S)
        async with self._lock:
            await self.training.save_if_due()

    def wake(self) -> None:
        """Lets `run` check whether an update is due. Call this when groups may have become complete."""
        self._selection.look()
        self._changed.set()

    @property
    def _due(self) -> bool:
        wanted = self._selection.due is not None or self.training.rewards_fell
        return self._pausing.reason is None and not self.held and wanted

    # -- one update ------------------------------------------------------------------------------

    async def update(
        self,
        given: Sequence[GivenTrajectory] | None,
        publish: bool = True,
        tag: str | None = None,
        progress: Mapping[str, float] | None = None,
        signal: Signal | None = None,
        chosen: Chosen | None = None,
    ) -> UpdateReport:
        """Makes one update on `given`, or on all complete groups, even if training is paused.

        Args:
            signal: what `given` teaches (None: rewards). Without `given`, it and `chosen` are those of
                `GroupSelection.take_all`; None: all.
            tag: after the update, whatever its status, the policy is saved with this tag.
            progress: see `AdapterTraining.progress`.

        Raises:
            InvalidRequestError: one of `given` cannot be trained on.
            StorageError: the journal cannot be written, so nothing was trained; or the update was made, but could not
                be saved. The message says which.
            Exception: what learning or publishing raised; policy and versions are as before.
        """
        groups = None if given is None else self._checked(given, signal)
        async with self._lock:
            await self._changes.flush()
            try:
                if groups is None:
                    taken = self._selection.take_all(signal, chosen or _any)
                    report = await self._update_on(taken, publish, progress, chosen or _any)
                else:
                    report = await self._update_on_given(groups, publish, progress)
            except Exception as error:  # whatever it is, it is reported and raised again
                self._failed(error)
                raise
            self.wake()  # so that `run` waits for the time of the next checkpoint
            return await self._kept(report, tag)

    async def _update_on(
        self,
        groups: Sequence[TrajectoryGroup],
        publish: bool = True,
        progress: Mapping[str, float] | None = None,
        chosen: Chosen = _any,
    ) -> UpdateReport:
        """An update on groups that were taken from the buffer. Ends each of them."""
        self._emit_updating([group.group_id for group in groups], sum(group.trajectories for group in groups))
        reasons: Sequence[DropReason | None] = [DropReason.SKIPPED] * len(groups)
        try:
            sources = sources_of(groups)
            earlier, scored = self._selection.scored(groups, chosen)
            learnt, own = [*earlier, *scored], slice(len(earlier), len(earlier) + len(groups))
            wanted, explores = self._selection.wanted(signal_of(learnt)), self._explores(learnt)
            if explores:
                learnt += self.training.plateau.better
            update = self.training.prepare(learnt, wanted, publish, explores)
            _note_advantages(groups, update.advantages[own])
            report = await self._update_of(update, progress)
            if report.status in CHANGED:
                self._ledger.updated(self.name, sources, report.metrics)
            if report.given_back:
                self._give_back(groups)
            reasons = _reasons(update, report)[own]
            report = replace(report, signal=update.signal, advice=self.training.plateau.advice)
        except (asyncio.CancelledError, EngineDeadError):  # the next process learns from them
            self._give_back(groups)
            raise
        finally:
            for group, reason in zip(groups, reasons, strict=True):
                self._buffer.finish(group, reason)
        return await self._concluded(report)

    async def _update_on_given(
        self, groups: Sequence[ScoredGroup], publish: bool, progress: Mapping[str, float] | None
    ) -> UpdateReport:
        """An update on groups that a client gave."""
        self._emit_updating((), sum(len(episode.turns) for group in groups for episode in group.episodes))
        report = await self._update_of(self.training.prepare(groups, publish=publish), progress)
        return await self._concluded(replace(report, given_back=False))  # they wait nowhere

    async def _update_of(self, update: PreparedUpdate, progress: Mapping[str, float] | None) -> UpdateReport:
        """Makes an update, records it, and responds to what diverged. It is recorded if it was held, skipped or failed,
        too, since its rewards count in their trend. Not if the teacher scored nothing: then its groups wait, and count
        when an update takes them again."""
        training = self.training
        progress = self.own_progress() if progress is None else progress
        try:
            await training.mark_best()
            if update.signal is Signal.REWARDS and (instead := await self._respond_to_rewards(update)) is not None:
                return instead
            if not update.groups:
                return training.reports.skipped(training.live, "no_trajectories")
            if not update.batch.teaches:
                report = training.reports.skipped(training.live, "no_signal", metrics=update.batch.metrics)
                await self._record(update, report)
                return report
            self._warn_of_placeholders(update.batch.samples)
            try:
                report = await self._learn(update, progress)
            except EngineDeadError:  # the update has not failed, but the process ends
                raise
            except Exception:  # whatever it is, it is raised again
                await self._record(update, UpdateReport(training.live, training.reports.step, "skipped", "failed"))
                raise
            if not report.given_back:
                await self._record(update, report)
            if report.divergences:
                await self._respond(report.divergences)
                report = replace(report, adapter=training.live, step=training.reports.step)
        finally:
            self.sweep()
        at_fault = report.status == "skipped" and report.reason != NO_GRADIENT
        if at_fault or (report.status == "held" and report.divergences):
            self._pausing.failed(report.reason)
        else:
            self._pausing.succeeded()
        return report

    async def _learn(self, update: PreparedUpdate, progress: Mapping[str, float] | None) -> UpdateReport:
        training = self.training
        await training.evaluate_if_due()  # the version that training starts from
        batch, problem = await training.taught(update)
        if not batch.samples:
            report = training.reports.skipped(training.live, "no_teacher", problem, metrics=batch.metrics)
            return replace(report, given_back=True)
        report = await training.learn(batch, update.publish, progress)
        if report.status in CHANGED:
            self._ledger.learnt(self.name, update.kept_shares, report.metrics)
        return report

    async def _concluded(self, report: UpdateReport) -> UpdateReport:
        """Evaluates the new version and saves a checkpoint, each if it is due. Adds them to the report."""
        if report.status == "published" and (result := await self.training.evaluate_if_due()):
            report = replace(report, metrics={**report.metrics, **result.metrics})
        name = await self.training.save_if_due()
        return report if name is None else replace(report, checkpoint=name)

    async def _record(self, update: PreparedUpdate, report: UpdateReport) -> None:
        await self._pausing.recorded(self._changes.updated(update, _reasons(update, report), report))

    def _failed(self, error: Exception) -> None:
        """Reports and counts an update, or what belongs to it, that has raised an error."""
        training, reason = self.training, str(error) or type(error).__name__
        training.reports.skipped(training.live, "failed", reason)
        self._pausing.failed(f"it failed: {reason}")

    def _give_back(self, groups: Sequence[TrajectoryGroup]) -> None:
        for group in groups:
            group.observed = True  # it counts once in the reward trend, however often an update takes it
            self._buffer.give_back(group)

    def _explores(self, scored: Sequence[ScoredGroup]) -> bool:
        """Whether an update on these groups looks for a way out of a plateau."""
        of_rewards = bool(scored) and signal_of(scored) is Signal.REWARDS
        return of_rewards and self._selection.explores and not any(group.has_advantages for group in scored)

    def _emit_updating(self, group_ids: Sequence[str], trajectories: int) -> None:
        """Emits that an update begins. `group_ids`: of collected groups; the first of them are named."""
        self._emit("updating", adapter=self.name, groups=list(group_ids[:_MAX_NAMED_GROUPS]), trajectories=trajectories)

    def _warn_of_placeholders(self, samples: Sequence[Datum]) -> None:
        """Warns of samples whose `sampling_logprobs` are placeholders, the first time that there are some."""
        count = sum(sample.has_placeholder_logprobs for sample in samples)
        if count and not self._warned:
            self._warned = True
            _log.warning(PLACEHOLDERS, count, self.name)
            self._emit("placeholder_logprobs", adapter=self.name, samples=count)

    # -- divergences -----------------------------------------------------------------------------

    async def _respond_to_rewards(self, update: PreparedUpdate) -> UpdateReport | None:
        """Reports a collapse of the rewards, and responds to it.

        Returns:
            The report of the update that is not made because of it; None: the update is to be made.
        """
        training = self.training
        fall = training.watch.judge_rewards(training.rewards.trend)
        if fall is None:
            return None
        training.watch.report([fall], training.rewards.trend, training.live, training.reports.step)
        if fall.action == Action.TELL:
            return None
        await self._respond([fall])
        rolled_back = fall.action == Action.ROLL_BACK
        reason = f"{fall.reason}: {training.live} is live again" if rolled_back else fall.reason
        report = training.reports.skipped(training.live, "rolled_back" if rolled_back else "diverged", reason)
        report = replace(report, divergences=(fall,))
        if not rolled_back:  # which starts a new trend
            await self._record(update, report)
        return report

    async def _respond(self, found: Sequence[Divergence]) -> None:
        """Pauses or rolls back for divergences that were reported and whose update was held."""
        reasons = {each.action: each.reason for each in found}
        if Action.ROLL_BACK in reasons:
            await self.training.roll_back(None)
            await self._pausing.recorded(self._changes.rolled_back())
            self._selection.restart()
        if Action.PAUSE in reasons:
            self.pause(reasons[Action.PAUSE])

    # -- other changes of the policy -------------------------------------------------------------

    async def settled(self) -> None:
        """Returns when no change is under way."""
        async with self._lock:
            pass

    async def open(self) -> None:
        """See `AdapterTraining.open`. The first time, it also makes the updates again that a crash has undone.

        Raises:
            ConfigError: the journal is damaged.
            StorageError: the journal cannot be written.
        """
        async with self._lock:
            await self.training.open()
            self._selection.restart()
            await self._changes.open()
            self.sweep()

    async def roll_back(self, to: str | None) -> None:
        """See `AdapterTraining.roll_back` and `PolicyJournal.check_rollback`."""
        async with self._lock:
            await self._changes.check_rollback(to)
            try:
                await self.training.roll_back(to)
                self._selection.restart()
                await self._changes.rolled_back()
            finally:
                self.sweep()

    async def publish_again(self) -> AdapterRef:
        """See `AdapterTraining.publish_again`."""
        async with self._lock:
            return await self.training.publish_again()

    async def rebuild(self, rebuild: Callable[[AdapterTraining, PolicyJournal], Awaitable[T]]) -> T:
        """Replaces the policy by one that `rebuild` makes; see `AdapterTraining.rebuilding`. Updates wait meanwhile."""
        async with self._lock:
            await self._changes.flush()
            before = self.training.versions.latest
            try:
                return await rebuild(self.training, self._changes)
            finally:
                if self.training.versions.latest != before:
                    self._selection.restart()
                self.sweep()

    async def close(self) -> None:
        """Saves what is in no checkpoint yet; see `AdapterTraining.close`."""
        async with self._lock:
            await self.training.close()

    async def save(self, step: int | None, tags: Sequence[str], metrics: Mapping[str, float]) -> CheckpointCard:
        """See `AdapterTraining.save`."""
        async with self._lock:
            self._changes.begin()
            return await self.training.save(step, tags, metrics)

    async def _kept(self, report: UpdateReport, tag: str | None) -> UpdateReport:
        """Returns when the update is on the disk: in the journal and, if there is a `tag`, in a checkpoint."""
        try:
            await self._changes.flush()
            if tag is None:
                return report
            self._changes.begin()
            card = await self.training.save(tags=[tag])
        except StorageError as error:
            raise StorageError(f"the update ended as {report.status!r}, step {report.step}, but {error}") from error
        return replace(report, checkpoint=card.name)

    async def mark_best(self) -> None:
        """See `AdapterTraining.set_best_to_latest`. The version is saved at once, because the progress of the next
        update names it, and outlives a crash. The base model needs no checkpoint."""
        async with self._lock:
            self._changes.begin()
            await self.training.set_best_to_latest()
            if self.training.versions.latest != BASE_ADAPTER:
                await self.training.save_if_due(now=True)

    async def begin_lesson(self, pace: Pace, tag: str) -> CheckpointCard:
        """See `AdapterTraining.begin_lesson`. Before it, saves the policy as it is with this tag."""
        async with self._lock:
            self._changes.begin()
            card = await self.training.save(tags=[tag])
            self.training.begin_lesson(pace)
            self._selection.restart()
            return card

    async def end_lesson(self) -> None:
        """See `AdapterTraining.end_lesson`. An update in progress still finishes at the lesson's pace."""
        async with self._lock:
            self.training.end_lesson()
            self._selection.forget()  # what the lesson has sampled; an update of others would be skipped for it
        self.wake()

    async def evaluate_if_due(self, early: bool = False) -> EvaluationResult | None:
        """See `AdapterTraining.evaluate_if_due`."""
        async with self._lock:
            return await self.training.evaluate_if_due(early)

    # -- pauses ----------------------------------------------------------------------------------

    @property
    def pause_reason(self) -> str | None:
        """Why automatic updates are stopped; None: they are not."""
        return self._pausing.reason

    def pause(self, reason: str = "asked") -> None:
        """Stops automatic updates. An update in progress still finishes."""
        self._pausing.pause(reason)

    def resume(self) -> None:
        if self._pausing.resume():
            self.wake()

    def hold(self, reason: str) -> None:
        """Stops automatic updates, until the next call with "" for the reason."""
        self._pausing.hold(reason)
        self.wake()

    # -- what may be trained on ------------------------------------------------------------------

    def reason_against(self, version: AdapterRef | None) -> DropReason | None:
        """Why the trajectories of this version cannot be trained on; None if they can, or if the version is unknown."""
        if version is None:
            return None
        staleness = self.training.versions.staleness(version)
        if staleness is None:
            return DropReason.UNKNOWN_VERSION
        return DropReason.STALE if staleness > self._config.max_staleness else None

    def sweep(self) -> None:
        """Drops what cannot be trained on any more."""
        self._buffer.sweep(self.name, self.reason_against)

    def _checked(self, given: Sequence[GivenTrajectory], signal: Signal | None) -> Sequence[ScoredGroup]:
        """The groups of a client's trajectories. Raises InvalidRequestError."""
        groups = given_groups(given, self._staleness_of_given)
        if signal is not None:
            groups = tuple(replace(group, signal=signal) for group in groups)
        check_loss(groups, loss_of(signal_of(groups), self._config.loss))
        return groups

    def _staleness_of_given(self, version: AdapterRef) -> int:
        """How many versions behind the latest one a version is.

        Raises:
            InvalidRequestError: trajectories of this version cannot be trained on.
        """
        if reason := self.reason_against(version):
            raise InvalidRequestError(
                f"lora_version: {version} cannot be trained on ({reason.value}); the latest version is "
                f"{self.training.versions.latest}, and max_staleness is {self._config.max_staleness}",
                "trajectories",
            )
        return self.training.versions.staleness(version) or 0

    # -- status ----------------------------------------------------------------------------------

    @property
    def live(self) -> AdapterRef:
        """The version that samples what is trained on."""
        return self.training.live or BASE_ADAPTER

    @property
    def per_update(self) -> int:
        """Trajectories with a signal that make an update of rewards."""
        return self.training.pace.trajectories

    @property
    def waiting(self) -> int:
        """Trajectories that no update has taken yet."""
        return self._buffer.waiting(self.name)

    @property
    def has_enough(self) -> bool:
        """Whether the trajectories that wait are enough for an update of rewards."""
        return self._selection.enough

    @property
    def with_signal(self) -> int:
        """Trajectories that wait and have a learning signal."""
        return self._selection.with_signal

    @property
    def without_signal(self) -> int:
        """See `GroupSelection.without_signal`."""
        return self._selection.without_signal

    @property
    def is_changing(self) -> bool:
        """Whether the policy is being updated, saved or replaced."""
        return self._lock.locked()

    def _state(self) -> str:
        if self.is_changing:
            return "updating"
        if self._pausing.reason is not None:
            return "paused"
        return "running" if self.waiting else "idle"

    def status(self) -> TrainingStatus:
        """The status of the adapter. The service adds `checkpoints` and `trained`."""
        training, buffer, name = self.training, self._buffer, self.name
        best, reports = training.checkpoints.best, training.reports
        return TrainingStatus(
            state=self._state(),
            pause_reason=self._pausing.reason,
            adapter=name,
            current=training.live,
            step=reports.step,
            trajectories_collected=buffer.collected[name],
            trajectories_waiting=buffer.unrewarded(name),
            groups_ready=len(buffer.ready(name)),
            groups_open=buffer.still_open(name),
            updates_total=reports.updates,
            updates_per_second=reports.updates_per_second,
            last_update=reports.last_update,
            metrics=reports.metrics,
            drops={reason.value: count for reason, count in buffer.drops[name].items()},
            skips=dict(reports.skips),
            diverged=dict(training.watch.counts),
            last_divergences=tuple(training.watch.newest),
            advice=training.plateau.advice,
            reward_running_mean=training.rewards.trend.mean,
            best=best.ref if best else None,
            evaluation=training.evaluations.last,
            detail={
                "lineage": list(training.versions.last(_VERSIONS_SHOWN)),
                "unpublished": training.unpublished,
                "checkpoint_failures": training.checkpoints.failures,
                "evaluation_failures": training.evaluations.failures,
                "trajectories_trained": buffer.trained[name],
                "failures_in_a_row": self._pausing.failures,
                "trajectories_with_signal": self._selection.with_signal,
                "trajectories_without_signal": self._selection.without_signal,
                "people_waiting": self._selection.waiting(),
            },
        )


def _reasons(update: PreparedUpdate, report: UpdateReport) -> list[DropReason | None]:
    """For each group of an update, why it was not trained on; None: it was."""
    return [reason or _DROP_REASONS[report.status] for reason in update.drop_reasons]


def _note_advantages(groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages]) -> None:
    """Keeps the advantages of the members that an update has taken, for people to look at."""
    for group, computed in zip(groups, advantages, strict=True):
        members = group.in_state(TrajectoryState.TRAINING)
        if isinstance(computed, DropReason):
            computed = GroupAdvantages((0.0,) * len(members))
        group.divisor = computed.divisor
        for member, value in zip(members, computed.values, strict=True):
            member.advantage = value
