"""Trainee: one adapter's policy, from a batch to a live version, and back.

batch ─▶ learn ─▶ gate ─▶ stage ─▶ gate ─▶ flip ─▶ checkpoint
           │        │       │        │       │
           └────────┴───────┴────────┴───────┴──▶ put back: the policy as before, the version discarded

Where no version is evaluated all of that up to the flip is one trip to the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from mlx_parallm.core import BASE_ADAPTER, AdapterRef, CheckpointCard, UpdateReport
from mlx_parallm.errors import AdapterFileError, ConflictError
from mlx_parallm.rl.archive import BEST, Archive, KeptVersion
from mlx_parallm.rl.gate import Gate
from mlx_parallm.rl.lineage import Lineage
from mlx_parallm.rl.parts import Kept, Learner, Publish, Publisher
from mlx_parallm.rl.reports import Emit, Reporter
from mlx_parallm.rl.rewards import RewardMemory
from mlx_parallm.rl.samples import UpdateBatch, UpdateOutcome
from mlx_parallm.rl.settings import LoopSettings
from mlx_parallm.rl.snapshot import PolicySnapshot

PolicyOf = Callable[[AdapterRef], Awaitable[PolicySnapshot]]
"""The weights of a live version that no trainer made: a policy without an optimizer's state, at step 0."""

PROGRESS = ("run_steps", "run_tasks")
"""What `Trainee.progress` may hold."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TraineeParts:
    """What all trainees share. `policy_of` None: only what was trained here can be trained on."""

    learner: Learner
    publisher: Publisher
    gate: Gate
    settings: LoopSettings
    emit: Emit
    policy_of: PolicyOf | None = None


@dataclass(slots=True)
class Unsaved:
    """What no checkpoint has yet. `updates`: since the last attempt to save. `since`: of the first of them, monotonic
    seconds; None: there is none. `lost`: whether a crash now would lose an update."""

    updates: int = 0
    since: float | None = None
    lost: bool = False

    def add(self) -> None:
        self.updates += 1
        self.since = time.monotonic() if self.since is None else self.since
        self.lost = True

    def try_later(self) -> None:
        """An attempt failed: the next one comes after as many updates, or as much time, as any other."""
        self.updates, self.since = 0, time.monotonic()


class Trainee:
    """One coroutine at a time: the loop's lock sees to it.

    `drifted`: the policy is ahead of the last published version. The *best* version is the one that drew the rewards
    which brought the running mean to its best: the one that was live before that update.

    `progress`: what whoever drives the training wants to find again after a restart, as of the last update; it is in
    the metrics of every checkpoint.

    Invariant: `_undo` is set while the learner's policy may not be what the books say; it is restored before
    anything else is done with the policy.

    Args:
        serves_base: whether the base model stands for this adapter until it has a version. Any other adapter gets a
            first version at once, equal to the base.
    """

    def __init__(self, name: str, parts: TraineeParts, serves_base: bool) -> None:
        self.name = name
        self.lineage = Lineage(BASE_ADAPTER)
        self.memory = RewardMemory()
        self.drifted = False
        self.progress: Mapping[str, float] = {}
        self.archive = Archive(name, parts.learner, parts.publisher, parts.emit)
        self.reports = Reporter(name, parts.emit)
        self._parts = parts
        self._learner = parts.learner
        self._publisher = parts.publisher
        self._serves_base = serves_base
        self._undo: Kept | None = None
        self._unsaved = Unsaved()

    @property
    def live(self) -> AdapterRef | None:
        """What the name means, whoever made it so."""
        return self._publisher.live(self.name)

    # -- start -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Begins where the live version's newest checkpoint ends; with its weights, where it has none; or, where
        nothing is live, equal to the base.

        Raises:
            InvalidRequestError: what is live has other ranks, alpha or targets than those configured.
            ConflictError: it cannot be trained on from what is known of it.
        """
        live = self.live
        card = self.archive.checkpoint_of(live)
        start = None if live is None else await self._start(live, card)
        await self._learner.open(self.name, start)
        self._undo, self.drifted, self.memory = None, False, RewardMemory()
        self._unsaved = Unsaved()
        self.archive.set_best(None)
        self.lineage = Lineage(live or BASE_ADAPTER)
        self.reports.step = start.step if start else 0
        if start is not None and card is not None:
            self.memory.restore(card.metrics)
            self.progress = {name: card.metrics[name] for name in PROGRESS if name in card.metrics}
            await self._resume_best(KeptVersion(self.lineage.tip, start))
        elif live is None and not self._serves_base:
            await self._publish_first()
        self._parts.emit("started", adapter=self.name, version=str(self.lineage.tip), step=self.reports.step)

    async def _start(self, live: AdapterRef, card: CheckpointCard | None) -> PolicySnapshot:
        if card is not None:
            try:
                return (await self._publisher.load(self.name, card.name))[1]
            except AdapterFileError as error:
                _log.warning("%s begins with the weights of %s and a new optimizer: %s", self.name, live, error)
        if self._parts.policy_of is None:
            raise ConflictError(f"{live} was not trained here, so it cannot be trained on; start another name.")
        return await self._parts.policy_of(live)

    async def _resume_best(self, start: KeptVersion) -> None:
        """The best version of the run that goes on, or, where its checkpoint is gone, the one it goes on from."""
        best = await self.archive.find_best()
        if best is None:
            self.memory.trend.forget_best()
        self.archive.set_best(KeptVersion(best.ref) if best else start)

    async def _publish_first(self) -> None:
        async with self._staged() as ref:
            await self._publisher.flip(ref)
            self.lineage.append(ref)

    # -- an update -------------------------------------------------------------------------------

    async def mark_best(self) -> None:
        """Remembers the version that is live, where the rewards that it drew brought the running mean to its best."""
        if not self.drifted and self.memory.trend.mark_best():
            tip = self.lineage.tip
            policy = None if tip == BASE_ADAPTER else await self._settled()
            self.archive.set_best(KeptVersion(tip, policy, {**self.memory.to_metrics(), **self.progress}))

    @property
    def rewards_fell(self) -> bool:
        """Whether it is time to go back to the best version."""
        drop = self._parts.settings.rollback_drop
        return drop is not None and self.archive.best is not None and self.memory.trend.fell_by(drop)

    async def learn(
        self, batch: UpdateBatch, publish: bool = True, progress: Mapping[str, float] | None = None
    ) -> UpdateReport:
        """One update. What does not end published or trained leaves policy, versions and `progress` as before.

        Raises:
            Exception: learner's or publisher's; policy and versions are as before.
        """
        self._undo = await self._settled()
        try:
            report = await self._attempt(batch, publish)
            if self._undo is None and progress is not None:
                self.progress = progress
            return report
        finally:
            await self._put_back()

    async def _attempt(self, batch: UpdateBatch, publish: bool) -> UpdateReport:
        gate = self._parts.gate
        at_once = self._at_once() if publish and not gate.evaluates else None
        outcome, live = await self._learner.learn(self.name, batch, at_once)
        if outcome.skipped:
            return self.reports.skipped(self.live, outcome.skipped, metrics=outcome.metrics)
        if refusal := gate.judge(outcome.metrics):
            return self.reports.held(self.live, refusal, outcome)
        if live is not None:
            return self._learnt(outcome, live)
        if not publish:
            return self._learnt(outcome, None)
        async with self._staged() as ref:
            if refusal := await gate.evaluated(ref):
                return self.reports.held(self.live, refusal, outcome)
            await self._publisher.flip(ref)
            return self._learnt(outcome, ref)

    def _at_once(self) -> Publish:
        gate = self._parts.gate
        return self._publisher.at_once(
            self.name, lambda outcome: not outcome.skipped and gate.judge(outcome.metrics) is None, self.lineage.expect
        )

    def _learnt(self, outcome: UpdateOutcome, published: AdapterRef | None) -> UpdateReport:
        """From here on the policy is what the books say."""
        self._undo = None
        self._unsaved.add()
        self.drifted = published is None
        if published is not None:
            self.lineage.append(published)
        return self.reports.learnt("published" if published else "trained", published or self.live, outcome)

    @asynccontextmanager
    async def _staged(self) -> AsyncIterator[AdapterRef]:
        """A new version of the learner's policy; forgotten unless it is the lineage's last after."""
        ref = await self._publisher.stage(self.name, self.lineage.expect)
        try:
            yield ref
        finally:
            if self.lineage.tip != ref:
                self._publisher.discard(ref)

    # -- checkpoints -----------------------------------------------------------------------------

    @property
    def saves_in(self) -> float | None:
        """Seconds until a checkpoint is due, 0 for one that is; None: every update is in one."""
        if not self._unsaved.lost or self._unsaved.since is None:
            return None
        settings = self._parts.settings
        if self._unsaved.updates >= settings.checkpoint_interval:
            return 0.0
        return max(0.0, self._unsaved.since + settings.checkpoint_s - time.monotonic())

    async def save_if_due(self) -> str | None:
        """The name of the checkpoint that was due. One that fails is counted, and tried again later."""
        if self.saves_in != 0:
            return None
        try:
            return (await self.save()).name
        except Exception:  # noqa: BLE001 - the archive has logged it; what was learnt is live
            self._unsaved.try_later()
            return None

    async def close(self) -> None:
        """Saves what no checkpoint has. Raises what `save` raises."""
        if self._unsaved.lost:
            await self.save()

    async def save(
        self, step: int | None = None, tags: Sequence[str] = (), metrics: Mapping[str, float] | None = None
    ) -> CheckpointCard:
        """The policy as it is, and the optimizer's state; a policy that was not published gets a version for it.

        `metrics`: in place of the last update's.

        Raises:
            ConflictError: the policy is equal to the base; `step` is taken.
            Exception: publisher's.
        """
        policy = await self._settled()
        of_update = self.reports.metrics if metrics is None else metrics
        metrics = {**of_update, **self.memory.to_metrics(), **self.progress}
        if self.drifted:
            async with self._staged() as ref:
                card = await self.archive.save(ref, policy, metrics, tags, step)
        elif self.lineage.tip == BASE_ADAPTER:
            raise ConflictError(f"{self.name!r} is equal to the base model as yet: there is nothing to save.")
        else:
            card = await self.archive.save(self.lineage.tip, policy, metrics, tags, step)
        self._unsaved = Unsaved()
        return card

    # -- back ------------------------------------------------------------------------------------

    async def roll_back(self, to: str | None) -> AdapterRef:
        """Serves and trains on from an earlier version: `best` (None), or a checkpoint by name or tag.

        Raises:
            ConflictError: there is no best version.
            UnknownModelError, AdapterFileError: there is no such checkpoint; it cannot be used.
            Exception: learner's or publisher's; policy and versions are as before.
        """
        goal = await self.archive.find(to)
        with self.archive.hold(goal):
            self._undo = await self._settled()
            try:
                await self._learner.restore(self.name, goal.policy)
                ref = await self._go_live_again(goal)
                self._undo = None
            finally:
                await self._put_back()
            self.drifted = False
            self.memory.restart()
            self.reports.step = goal.policy.step if goal.policy else 0
            self._parts.emit("rollback", adapter=self.name, version=str(ref), step=self.reports.step)
            await self._go_on_from(ref, best=to in (None, BEST))
        return ref

    async def _go_live_again(self, goal: KeptVersion) -> AdapterRef:
        """The base cannot be what the name means: a version equal to it is."""
        if goal.ref != BASE_ADAPTER:
            await self._publisher.flip(goal.ref)
            self.lineage.back_to(goal.ref)
            return goal.ref
        async with self._staged() as ref:
            await self._publisher.flip(ref)
            self.lineage.back_to(BASE_ADAPTER)
            self.lineage.append(ref)
            return ref

    async def _go_on_from(self, ref: AdapterRef, best: bool) -> None:
        """A restart does too: the checkpoint of this version, which the best one may not have yet, is the latest."""
        if best:
            self.archive.set_best(KeptVersion(ref, await self._settled()))
            self._unsaved.add()
            with suppress(Exception):  # logged; it is tried again with the next checkpoint
                await self.save()
        else:
            self._unsaved = Unsaved()
        if card := self.archive.checkpoint_of(ref):
            await self.archive.go_on_from(card.name)

    async def _settled(self) -> Kept:
        """The policy as the books have it, with the learner."""
        if self._undo is None:
            return await self._learner.keep(self.name)
        undo = self._undo
        await self._learner.restore(self.name, undo)
        self._undo = None
        return undo

    async def _put_back(self) -> None:
        if self._undo is None:
            return
        try:
            await self._settled()
        except Exception:  # noqa: BLE001 - what went wrong first is on its way to the caller
            _log.exception("the policy of %s could not be put back; it will be before it is used again", self.name)
