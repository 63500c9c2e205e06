"""TrainingLoop decides when one adapter is updated, and on which trajectories.

buffer ─▶ complete groups ─▶ selection ─▶ advantages, batch ─▶ AdapterTraining.learn ─▶ new live version
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.config import ResolvedTraining
from mlx_parallm.core import AdapterRef, EvaluationResult, GivenTrajectory, Signal, TrainingStatus, UpdateReport
from mlx_parallm.errors import InvalidRequestError, StorageError
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.divergence.pausing import Pausing
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.objectives.signals import loss_of, signal_of
from mlx_parallm.rl.sources import SourceLedger
from mlx_parallm.rl.trajectories import DropReason
from mlx_parallm.rl.updates.adapter_training import AdapterTraining
from mlx_parallm.rl.updates.given import check_loss, given_groups
from mlx_parallm.rl.updates.pace import Pace
from mlx_parallm.rl.updates.recovery import PolicyJournal
from mlx_parallm.rl.updates.selection import GroupSelection
from mlx_parallm.rl.updates.turns import Chosen, UpdateTurns
from mlx_parallm.rl.updates.update import DivergenceResponse, UpdateParts, Updates

_VERSIONS_SHOWN = 8


def training_status(
    training: AdapterTraining,
    buffer: TrajectoryBuffer,
    state: str,
    pause_reason: str | None,
    detail: Mapping[str, object],
) -> TrainingStatus:
    """The status of an adapter. The service adds `checkpoints` and `trained`. `detail`: what the loop knows besides."""
    best, reports, name = training.checkpoints.best, training.reports, training.name
    return TrainingStatus(
        state=state,
        pause_reason=pause_reason,
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
            **detail,
        },
    )


_AFTER_FAILURE_S = 1.0
"""Pause after a failure while updates are paused already."""

UNTAUGHT_S = 10.0
"""Pause after an update for which the teacher scored nothing. The same trajectories are then tried again."""

_log = logging.getLogger(__name__)


class TrainingLoop:
    """Updates one adapter: on request, and whenever enough trajectories are ready. One lock orders all changes.

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
        self._selection = GroupSelection(training, buffer, config)
        self._turns = UpdateTurns(training, buffer, config, self._selection)
        self._changes = PolicyJournal(training, config)
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._pausing = Pausing(training.name, emit, config.max_skips)
        response = DivergenceResponse(training, self._changes, self._selection, self._pausing)
        parts = UpdateParts(
            buffer,
            config,
            ledger or SourceLedger(),
            self._turns,
            self._changes,
            self._pausing,
            response,
            self.sweep,
            emit,
        )
        self._updates = Updates(training, parts, lambda: self.own_progress())

    @property
    def name(self) -> str:
        return self.training.name

    # -- automatic updates -----------------------------------------------------------------------

    async def run(self) -> None:
        """Makes updates and checkpoints when they are due. Never returns. Whatever fails is logged, reported and tried
        again; after `max_skips` failures in a row, or if the disk fails, updates pause."""
        while True:
            was_paused = self._pausing.reason is not None
            try:
                await self._wait()
                await self._catch_up()
            except Exception as error:  # noqa: BLE001 - without this loop, nothing would ever be learnt again
                _log.exception("an update of %s failed", self.name)
                self._updates.failed(error)
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
            async with self.entry(), self._lock:
                if self._due:  # still true, so no other update has taken the trajectories
                    await self._changes.flush()
                    await self._updates.conclude(await self._updates.on_groups(self._turns.take()))
            if self._updates.untaught:
                await asyncio.sleep(UNTAUGHT_S)
        async with self._lock:
            await self.training.save_if_due()

    def wake(self) -> None:
        """Lets `run` check whether an update is due. Call this when groups may have become complete."""
        self._selection.look()
        self._changed.set()

    @property
    def has_enough(self) -> bool:
        """Whether the trajectories that wait are enough for an update."""
        return self._selection.enough

    @property
    def with_signal(self) -> int:
        """Trajectories that wait and have a learning signal."""
        return self._selection.with_signal

    @property
    def without_signal(self) -> int:
        """Trajectories dropped since the last update, because all answers of their group have the same reward."""
        return self._selection.without_signal

    @property
    def _due(self) -> bool:
        wanted = self._turns.due is not None or self.training.rewards_fell
        return self._pausing.reason is None and not self.held and wanted

    # -- on request ------------------------------------------------------------------------------

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
                `UpdateTurns.take_all`.
            tag: after the update, whatever its status, the policy is saved with this tag.
            progress: see `AdapterTraining.progress`.

        Raises:
            InvalidRequestError: one of `given` cannot be trained on.
            StorageError: the journal cannot be written, so nothing was trained; or the update was made, but could not
                be saved. The message says which.
            Exception: what learning or publishing raised; policy and versions are as before.
        """
        groups = None if given is None else given_groups(given, self._staleness_of_given)
        if groups is not None and signal is not None:
            groups = tuple(replace(group, signal=signal) for group in groups)
        if groups is not None:
            check_loss(groups, loss_of(signal_of(groups), self._config.loss))
        async with self._lock:
            await self._changes.flush()
            try:
                if groups is None:
                    report = await self._updates.on_groups(self._turns.take_all(signal, chosen), publish, progress)
                else:
                    report = await self._updates.on_given(groups, publish, progress)
                report = await self._updates.conclude(report)
            except Exception as error:  # whatever it is, it is reported and raised again
                self._updates.failed(error)
                raise
            self.wake()  # so that `run` waits for the time of the next checkpoint
            return await self._kept(report, tag)

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

    async def roll_back(self, to: str | None) -> None:
        """See `AdapterTraining.roll_back`."""
        async with self._lock:
            try:
                await self.training.roll_back(to)
                self._selection.restart()
                await self._changes.rolled_back()
            finally:
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
            self._selection.forget()  # what the lesson has drawn; an update of others would be skipped for it
        self.wake()

    async def evaluate_if_due(self, early: bool = False) -> EvaluationResult | None:
        """See `AdapterTraining.evaluate_if_due`."""
        async with self._lock:
            return await self.training.evaluate_if_due(early)

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

    # -- status ----------------------------------------------------------------------------------

    def status(self) -> TrainingStatus:
        """See `training_status`."""
        detail = {
            "failures_in_a_row": self._pausing.failures,
            "trajectories_with_signal": self._selection.with_signal,
            "trajectories_without_signal": self._selection.without_signal,
            "people_waiting": self._turns.waiting(),
        }
        return training_status(self.training, self._buffer, self._state(), self._pausing.reason, detail)

    @property
    def is_changing(self) -> bool:
        """Whether the policy is being updated, saved or replaced."""
        return self._lock.locked()

    def _state(self) -> str:
        if self.is_changing:
            return "updating"
        if self._pausing.reason is not None:
            return "paused"
        return "running" if self._buffer.waiting(self.name) else "idle"
