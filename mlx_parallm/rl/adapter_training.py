"""AdapterTraining: updates the policy of one adapter, publishes it as a live version, and rolls it back.

    batch ─▶ learn ─▶ gate ─▶ stage ─▶ evaluate ─▶ flip ─▶ checkpoint
               │        │       │         │         │
               └────────┴───────┴─────────┴─────────┴──▶ undo: the policy is restored, the version discarded

Staging adds a version that no request gets yet; the flip makes it live. If no evaluation is configured, everything up
to the flip happens on the device thread, with no trip to the event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.config import CheckpointingConfig, ResolvedTraining
from mlx_parallm.core import BASE_ADAPTER, AdapterRef, CheckpointCard, UpdateReport
from mlx_parallm.errors import AdapterFileError, ConflictError
from mlx_parallm.rl.collect.groups import VersionHistory
from mlx_parallm.rl.events import Emit, UpdateOutcome, UpdateReporter
from mlx_parallm.rl.gate import Gate
from mlx_parallm.rl.learn.learner import Learner
from mlx_parallm.rl.learn.policy import PolicySnapshot, PolicyState
from mlx_parallm.rl.objectives.batches import UpdateBatch
from mlx_parallm.rl.objectives.rewards import RewardHistory
from mlx_parallm.rl.publisher import BEST, AdapterCheckpoints, Publisher, TrainedVersion

PolicyOf = Callable[[AdapterRef], Awaitable[PolicySnapshot]]
"""Makes a policy from a live version that was not trained here: its weights, a new optimizer, step 0."""

PROGRESS = ("run_steps", "run_tasks")
"""The keys that `AdapterTraining.progress` may have."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterTrainingParts:
    """The objects that the training of every adapter uses.

    `policy_of` None: only adapters that were trained here can be trained further.
    """

    learner: Learner
    publisher: Publisher
    gate: Gate
    config: ResolvedTraining
    checkpointing: CheckpointingConfig
    emit: Emit
    policy_of: PolicyOf | None = None


@dataclass(slots=True)
class UnsavedUpdates:
    """The updates that are in no checkpoint yet.

    `count`: updates since the last attempt to save. `since`: when the first of them was made or, after a failed
    attempt, when that was made, in seconds of `time.monotonic`. `lost`: whether a crash now would lose an update.
    """

    count: int = 0
    since: float | None = None
    lost: bool = False

    def add(self) -> None:
        self.count += 1
        self.since = time.monotonic() if self.since is None else self.since
        self.lost = True

    def postpone(self) -> None:
        """Call this after a failed attempt to save: the next one is due after the usual number of updates or time."""
        self.count, self.since = 0, time.monotonic()


class AdapterTraining:
    """Trains one adapter. The lock of `TrainingLoop` ensures that one coroutine uses it at a time.

    Attributes:
        unpublished: whether the policy has updates that are in no published version.
        progress: where a run on an environment was at the last update, so that it can resume there. It is saved with
            the metrics of every checkpoint.
        checkpoints: the adapter's checkpoints, and its best version: the latest one when the running mean reward was
            highest.

    Invariant: while the learner's policy may differ from the one that versions and reports describe, `_undo` is the
    policy to go back to. It is restored before the policy is used for anything else.

    Args:
        serves_base: whether requests for this adapter get the base model until it has a version. Other adapters get a
            first version at once, equal to the base model.
    """

    def __init__(self, name: str, parts: AdapterTrainingParts, serves_base: bool) -> None:
        self.name = name
        self.versions = VersionHistory(BASE_ADAPTER)
        self.rewards = RewardHistory()
        self.unpublished = False
        self.progress: Mapping[str, float] = {}
        self.checkpoints = AdapterCheckpoints(name, parts.learner, parts.publisher, parts.emit)
        self.reports = UpdateReporter(name, parts.emit)
        self._parts = parts
        self._learner = parts.learner
        self._publisher = parts.publisher
        self._serves_base = serves_base
        self._undo: PolicyState | PolicySnapshot | None = None
        self._unsaved = UnsavedUpdates()

    @property
    def live(self) -> AdapterRef | None:
        """The adapter's live version, whether or not it was trained here."""
        return self._publisher.live(self.name)

    # -- start -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Starts training from the newest checkpoint of the live version. If that has no checkpoint, training starts
        from its weights; if no version is live, from a new policy that equals the base model.

        Raises:
            InvalidRequestError: the live version has another rank, alpha or targets than those configured.
            ConflictError: the live version was not trained here.
        """
        live = self.live
        card = self.checkpoints.newest_of(live)
        start = None if live is None else await self._start(live, card)
        await self._learner.open(self.name, start)
        self._undo, self.unpublished, self.rewards = None, False, RewardHistory()
        self._unsaved = UnsavedUpdates()
        self.checkpoints.set_best(None)
        self.versions = VersionHistory(live or BASE_ADAPTER)
        self.reports.step = start.step if start else 0
        if start is not None and card is not None:
            self.rewards.restore(card.metrics)
            self.progress = {name: card.metrics[name] for name in PROGRESS if name in card.metrics}
            await self._resume_best(TrainedVersion(self.versions.latest, start))
        elif live is None and not self._serves_base:
            await self._publish_first()
        self._parts.emit("started", adapter=self.name, version=str(self.versions.latest), step=self.reports.step)

    async def _start(self, live: AdapterRef, card: CheckpointCard | None) -> PolicySnapshot:
        if card is not None:
            try:
                return (await self._publisher.load(self.name, card.name))[1]
            except AdapterFileError as error:
                _log.warning("%s begins with the weights of %s and a new optimizer: %s", self.name, live, error)
        if self._parts.policy_of is None:
            raise ConflictError(f"{live} was not trained here, so it cannot be trained on; start another name.")
        return await self._parts.policy_of(live)

    async def _resume_best(self, start: TrainedVersion) -> None:
        """Sets the best version to that of the resumed run or, if its checkpoint is gone, to the resumed version."""
        best = await self.checkpoints.load_best()
        if best is None:
            self.rewards.trend.forget_best()
        self.checkpoints.set_best(TrainedVersion(best.ref) if best else start)

    async def _publish_first(self) -> None:
        async with self._staged() as ref:
            await self._publisher.flip(ref)
            self.versions.append(ref)

    # -- an update -------------------------------------------------------------------------------

    async def mark_best(self) -> None:
        """Makes the latest version the best one if its rewards have raised the running mean to a new best value."""
        if not self.unpublished and self.rewards.trend.mark_best():
            latest = self.versions.latest
            policy = None if latest == BASE_ADAPTER else await self._policy()
            self.checkpoints.set_best(TrainedVersion(latest, policy, {**self.rewards.to_metrics(), **self.progress}))

    @property
    def rewards_fell(self) -> bool:
        """Whether rewards have fallen so far that the best version should be restored."""
        drop = self._parts.config.gate.rollback_drop
        return drop is not None and self.checkpoints.best is not None and self.rewards.trend.fell_by(drop)

    async def learn(
        self, batch: UpdateBatch, publish: bool = True, progress: Mapping[str, float] | None = None
    ) -> UpdateReport:
        """Makes one update. If its status is neither published nor trained, policy, versions and `progress` stay as
        they were.

        Raises:
            Exception: raised by learner or publisher; policy and versions are as before.
        """
        async with self._undone_on_failure():
            report = await self._attempt(batch, publish)
            if self._undo is None and progress is not None:
                self.progress = progress
            return report

    async def _attempt(self, batch: UpdateBatch, publish: bool) -> UpdateReport:
        gate = self._parts.gate
        on_device = self._publish_on_device if publish and not gate.evaluates else None
        outcome, live = await self._learner.learn(self.name, batch, on_device)
        if outcome.skipped:
            return self.reports.skipped(self.live, outcome.skipped, metrics=outcome.metrics)
        if refusal := gate.judge(outcome.metrics):
            return self.reports.held(self.live, refusal, outcome)
        if live is not None or not publish:
            return self._commit(outcome, live)
        async with self._staged() as ref:
            if refusal := await gate.evaluated(ref):
                return self.reports.held(self.live, refusal, outcome)
            await self._publisher.flip(ref)
            return self._commit(outcome, ref)

    def _publish_on_device(self, outcome: UpdateOutcome, weights: AdapterWeights) -> Future[AdapterRef] | None:
        """Publishes an update, if the gate accepts it. Called on the device thread, right after the update."""
        if outcome.skipped or self._parts.gate.judge(outcome.metrics):
            return None
        return self._publisher.publish_on_device(self.name, weights, self.versions.announce)

    def _commit(self, outcome: UpdateOutcome, published: AdapterRef | None) -> UpdateReport:
        """Keeps the update: from here on versions and reports agree with the policy."""
        self._undo = None
        self._unsaved.add()
        self.unpublished = published is None
        if published is not None:
            self.versions.append(published)
        return self.reports.updated("published" if published else "trained", published or self.live, outcome)

    @asynccontextmanager
    async def _staged(self) -> AsyncIterator[AdapterRef]:
        """Stages a new version of the learner's policy. After the block it is discarded, unless it is the latest of
        `versions`."""
        ref = await self._publisher.stage(self.name, self.versions.announce)
        try:
            yield ref
        finally:
            if self.versions.latest != ref:
                self._publisher.discard(ref)

    # -- checkpoints -----------------------------------------------------------------------------

    @property
    def saves_in(self) -> float | None:
        """Seconds until a checkpoint is due, 0 if it is due now; None if every update is in a checkpoint."""
        if not self._unsaved.lost or self._unsaved.since is None:
            return None
        checkpointing = self._parts.checkpointing
        if self._unsaved.count >= checkpointing.interval:
            return 0.0
        return max(0.0, self._unsaved.since + 60 * checkpointing.minutes - time.monotonic())

    async def save_if_due(self) -> str | None:
        """Saves a checkpoint if one is due, and returns its name. If that fails, it is due again later."""
        if self.saves_in != 0:
            return None
        try:
            return (await self.save()).name
        except Exception:  # noqa: BLE001 - it is logged already, and the update itself is live
            self._unsaved.postpone()
            return None

    async def close(self) -> None:
        """Saves updates that no checkpoint has. Raises what `save` raises."""
        if self._unsaved.lost:
            await self.save()

    async def save(
        self, step: int | None = None, tags: Sequence[str] = (), metrics: Mapping[str, float] | None = None
    ) -> CheckpointCard:
        """Saves the policy with the optimizer's state as a checkpoint of its version. If the policy has no version,
        because it is not published or still equals the base model, one is staged for the checkpoint.

        `metrics`: saved in place of those of the last update.

        Raises:
            ConflictError: there is another checkpoint of `step`.
            Exception: raised by the publisher.
        """
        policy = await self._policy()
        of_update = self.reports.metrics if metrics is None else metrics
        metrics = {**of_update, **self.rewards.to_metrics(), **self.progress}
        if self.unpublished or self.versions.latest == BASE_ADAPTER:
            async with self._staged() as ref:
                card = await self.checkpoints.save(ref, policy, metrics, tags, step)
        else:
            card = await self.checkpoints.save(self.versions.latest, policy, metrics, tags, step)
        self._unsaved = UnsavedUpdates()
        return card

    # -- rollback --------------------------------------------------------------------------------

    async def roll_back(self, to: str | None) -> AdapterRef:
        """Makes an earlier version live and continues training from it.

        `to`: name or tag of a checkpoint; None: the best version.

        Raises:
            ConflictError: there is no best version.
            UnknownModelError: there is no such checkpoint.
            AdapterFileError: the checkpoint cannot be used.
            Exception: raised by learner or publisher; policy and versions are as before.
        """
        goal = await self.checkpoints.find(to)
        with self.checkpoints.lease(goal):
            async with self._undone_on_failure():
                await self._learner.restore(self.name, goal.policy)
                ref = await self._flip_back(goal)
                self._undo = None
            self.unpublished = False
            self.rewards.restart()
            self.reports.step = goal.policy.step if goal.policy else 0
            self._parts.emit("rollback", adapter=self.name, version=str(ref), step=self.reports.step)
            await self._resume_from(ref, best=to in (None, BEST))
        return ref

    async def _flip_back(self, goal: TrainedVersion) -> AdapterRef:
        """Makes the goal live. The base model is not a version of the adapter: in its place, a new version that equals
        it goes live."""
        if goal.ref != BASE_ADAPTER:
            await self._publisher.flip(goal.ref)
            self.versions.rewind_to(goal.ref)
            return goal.ref
        async with self._staged() as ref:
            await self._publisher.flip(ref)
            self.versions.rewind_to(BASE_ADAPTER)
            self.versions.append(ref)
            return ref

    async def _resume_from(self, ref: AdapterRef, best: bool) -> None:
        """Makes a restart resume from this version. The best version may not have a checkpoint yet, so it is saved."""
        if best:
            self.checkpoints.set_best(TrainedVersion(ref, await self._policy()))
            self._unsaved.add()
            with suppress(Exception):  # `save` has logged it, and the next checkpoint saves the best version again
                await self.save()
        else:
            self._unsaved = UnsavedUpdates()
        if card := self.checkpoints.newest_of(ref):
            await self.checkpoints.set_latest(card.name)

    # -- undo ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _undone_on_failure(self) -> AsyncIterator[None]:
        """Restores the policy at the end of the block unless the block has set `_undo` to None."""
        self._undo = await self._policy()
        try:
            yield
        finally:
            if self._undo is not None:
                try:
                    await self._policy()
                except Exception:  # noqa: BLE001 - the block's own error is what the caller should see
                    _log.exception("the policy of %s could not be restored; it will be before its next use", self.name)

    async def _policy(self) -> PolicyState | PolicySnapshot:
        """The current policy. A pending undo is done first."""
        if self._undo is None:
            return await self._learner.state(self.name)
        policy = self._undo
        await self._learner.restore(self.name, policy)
        self._undo = None
        return policy
