"""TrainingLoop: when one adapter is updated, and from which trajectories."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from mlx_parallm.core import AdapterRef, CheckpointCard, GivenTrajectory, TrainingStatus, UpdateReport
from mlx_parallm.errors import InvalidRequestError, StorageError
from mlx_parallm.rl import candidates
from mlx_parallm.rl.batches import Prepared, prepare, prepare_imitation
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.candidates import Candidate
from mlx_parallm.rl.gathering import Gathering
from mlx_parallm.rl.groups import Drop, Group
from mlx_parallm.rl.reports import Emit
from mlx_parallm.rl.settings import LoopSettings
from mlx_parallm.rl.trainee import Trainee

_FATES = {"published": None, "trained": None, "held": Drop.HELD, "skipped": Drop.SKIPPED}
"""Of the trajectories of an update, by its report's status: None: trained on."""

_MINUTE = 60.0
_LINEAGE_SHOWN = 8

_log = logging.getLogger(__name__)


class TrainingLoop:
    """Updates by itself, on request and rollbacks take turns: one lock.

    Every group that is taken from the buffer is ended, whatever becomes of its update. A group that teaches nothing
    is dropped when it is complete (`Gathering`). One whose update was skipped, held or failed is dropped too, since it
    would do no better again.

    Args:
        imitation: the loss is cross_entropy: what is above the threshold is imitated, and groups are not compared.
    """

    def __init__(
        self, trainee: Trainee, buffer: TrajectoryBuffer, settings: LoopSettings, emit: Emit, imitation: bool = False
    ) -> None:
        self.trainee = trainee
        self._buffer = buffer
        self._settings = settings
        self._emit = emit
        self._imitation = imitation
        self._gathering = Gathering(trainee, buffer, settings.update_frequency, imitation)
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._pause_reason: str | None = None
        self._failures_in_a_row = 0
        self._times: deque[float] = deque()  # of updates in the last minute, monotonic
        self._last_update: float | None = None

    @property
    def name(self) -> str:
        return self.trainee.name

    # -- by itself -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Updates, and saves what has waited long enough. Never returns; an update that fails is counted."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.trainee.saves_in):
                    await self._wake.wait()
            self._wake.clear()
            while self._due():
                await self._automatic_update()
            if self.trainee.saves_in == 0:
                async with self._lock:
                    await self.trainee.save_if_due()

    def wake(self) -> None:
        """Trajectories may have become ready."""
        self._gathering.sort()
        self._wake.set()

    def _due(self) -> bool:
        return self._pause_reason is None and (self._gathering.enough or self.trainee.rewards_fell)

    async def _automatic_update(self) -> None:
        async with self._lock:
            if not self._due():
                return
            try:
                await self._update(self._buffer.take(self.name, self._settings.update_frequency))
            except Exception:  # noqa: BLE001 - costs this update; after a few of them training pauses
                _log.exception("an update of %s failed", self.name)

    # -- on request ------------------------------------------------------------------------------

    async def open(self) -> None:
        """See `Trainee.open`."""
        async with self._lock:
            await self.trainee.open()
            self._gathering.restart()
            self._sweep()

    async def update(
        self,
        given: Sequence[GivenTrajectory] | None,
        publish: bool = True,
        tag: str | None = None,
        progress: Mapping[str, float] | None = None,
    ) -> UpdateReport:
        """One update of `given`, or of all complete groups that wait; begins though training is paused.

        `tag`: the policy is saved under it, whatever came of the update. `progress`: see `Trainee.progress`.

        Raises:
            InvalidRequestError: one of `given` cannot be learnt from.
            ConflictError: there is nothing to save under `tag`: the policy is equal to the base.
            StorageError: the update is made, and could not be saved under `tag`.
            Exception: learner's or publisher's; policy and versions are as before.
        """
        brought = None if given is None else candidates.given(given)
        if brought is not None and not self._imitation and not all(candidate.rewards for candidate in brought):
            raise InvalidRequestError(
                "trajectories: give each of them a reward; only the loss cross_entropy does without", "trajectories"
            )
        async with self._lock:
            if brought is None:
                report = await self._update(self._buffer.take(self.name), publish, progress)
            else:
                report = await self._learn(brought, self._prepare(brought), publish, progress)
            self.wake()  # the time until its checkpoint runs
            return report if tag is None else await self._tagged(report, tag)

    async def _tagged(self, report: UpdateReport, tag: str) -> UpdateReport:
        try:
            card = await self.trainee.save(tags=[tag])
        except StorageError as error:
            raise StorageError(f"the update ended as {report.status!r}, step {report.step}, but {error}") from error
        return replace(report, checkpoint=card.name)

    async def roll_back(self, to: str | None) -> None:
        """See `Trainee.roll_back`."""
        async with self._lock:
            try:
                await self.trainee.roll_back(to)
                self._gathering.restart()
            finally:
                self._sweep()

    async def close(self) -> None:
        """See `Trainee.close`."""
        async with self._lock:
            await self.trainee.close()

    async def save(self, step: int | None, tags: Sequence[str], metrics: Mapping[str, float]) -> CheckpointCard:
        """See `Trainee.save`."""
        async with self._lock:
            return await self.trainee.save(step, tags, metrics)

    def pause(self, reason: str = "asked") -> None:
        """An update that is under way is finished."""
        if self._pause_reason is None:
            self._pause_reason = reason
            self._emit("paused", adapter=self.name, reason=reason)

    def resume(self) -> None:
        if self._pause_reason is not None:
            self._pause_reason = None
            self._failures_in_a_row = 0
            self._emit("resumed", adapter=self.name)
            self.wake()

    # -- one update ------------------------------------------------------------------------------

    async def _update(
        self, groups: Sequence[Group], publish: bool = True, progress: Mapping[str, float] | None = None
    ) -> UpdateReport:
        """Learns from groups that were taken, and ends each of them."""
        ends: Sequence[Drop | None] = [Drop.SKIPPED] * len(groups)
        try:
            if self._imitation:
                for group in groups:
                    self._buffer.drop_low(group, self._settings.imitation_threshold)
            flat, taken = self._gathering.take(groups)
            prepared = self._prepare([*flat, *taken], self._settings.update_frequency)
            report = await self._learn([*flat, *taken], prepared, publish, progress)
            ends = [verdict or _FATES[report.status] for verdict in prepared.verdicts[len(flat) :]]
            return report
        finally:
            for group, reason in zip(groups, ends, strict=True):
                self._buffer.finish(group, reason)

    def _prepare(self, taken: Sequence[Candidate], wanted: int | None = None) -> Prepared:
        if self._imitation:
            return prepare_imitation(taken, self._settings.imitation_threshold)
        return prepare(taken, self._settings.scale_rewards, self.trainee.memory, wanted)

    async def _learn(
        self, taken: Sequence[Candidate], prepared: Prepared, publish: bool, progress: Mapping[str, float] | None
    ) -> UpdateReport:
        trainee = self.trainee
        if not taken:
            return trainee.reports.skipped(trainee.live, "no_trajectories")
        try:
            await trainee.mark_best()
            if trainee.rewards_fell:
                ref = await trainee.roll_back(None)
                self._gathering.restart()
                return trainee.reports.skipped(ref, "rolled_back", f"the running mean reward fell: {ref} is live again")
            if not prepared.batch.samples:
                return trainee.reports.skipped(trainee.live, "no_signal", metrics=prepared.batch.metrics)
            report = await trainee.learn(prepared.batch, publish, progress)
            if name := await trainee.save_if_due():
                report = replace(report, checkpoint=name)
        except Exception as error:  # whatever it was is counted and reported, and raised again
            trainee.reports.skipped(trainee.live, "failed", str(error) or type(error).__name__)
            self._count_failure("failed")
            raise
        finally:
            self._sweep()
        self._count(report)
        return report

    def _count(self, report: UpdateReport) -> None:
        if report.status == "skipped":
            self._count_failure(report.reason)
            return
        self._failures_in_a_row = 0
        if report.status != "held":
            self._times.append(time.monotonic())
            self._last_update = time.time()

    def _count_failure(self, reason: str) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._settings.max_skips:
            self.pause(f"{self._failures_in_a_row} updates in a row were skipped, the last one: {reason}")

    # -- what may be trained on ------------------------------------------------------------------

    def judge(self, ref: AdapterRef) -> Drop | None:
        """Why what this version drew cannot be trained on."""
        lag = self.trainee.lineage.lag(ref)
        if lag is None:
            return Drop.FOREIGN
        return Drop.STALE if lag > self._settings.max_staleness else None

    def _sweep(self) -> None:
        self._buffer.sweep(self.name, self.judge)

    # -- figures ---------------------------------------------------------------------------------

    def status(self) -> TrainingStatus:
        """What this loop knows; the service adds `checkpoints` and `trained`."""
        trainee, buffer, name = self.trainee, self._buffer, self.name
        best = trainee.archive.best
        return TrainingStatus(
            enabled=True,
            state=self._state(),
            adapter=name,
            current=trainee.live,
            step=trainee.reports.step,
            trajectories_collected=buffer.collected[name],
            trajectories_waiting=buffer.unrewarded(name),
            groups_ready=len(buffer.ready(name)),
            updates_total=trainee.reports.updates,
            updates_per_second=self._updates_per_second(),
            last_update=self._last_update,
            metrics=trainee.reports.metrics,
            drops={reason.value: count for reason, count in buffer.drops[name].items()},
            skips=dict(trainee.reports.skips),
            reward_running_mean=trainee.memory.trend.mean,
            best=best.ref if best else None,
            detail=self._detail(),
        )

    def _state(self) -> str:
        if self._lock.locked():
            return "updating"
        if self._pause_reason is not None:
            return "paused"
        return "running" if self._buffer.waiting(self.name) else "idle"

    def _updates_per_second(self) -> float:
        """Over the last minute."""
        while self._times and self._times[0] < time.monotonic() - _MINUTE:
            self._times.popleft()
        return len(self._times) / _MINUTE

    def _detail(self) -> dict[str, object]:
        return {
            "pause_reason": self._pause_reason,
            "failures_in_a_row": self._failures_in_a_row,
            "lineage": list(self.trainee.lineage.newest(_LINEAGE_SHOWN)),
            "unpublished": self.trainee.drifted,
            "checkpoint_failures": self.trainee.archive.failures,
            "trajectories_with_signal": self._gathering.with_signal,
            "trajectories_without_signal": self._gathering.without_signal,
            "trajectories_trained": self._buffer.trained[self.name],
        }
