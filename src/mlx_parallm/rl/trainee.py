"""Trainee: one adapter's policy, from a batch to a live version, and back.

batch ─▶ learn ─▶ gate ─▶ stage ─▶ gate ─▶ flip ─▶ checkpoint
           │        │       │        │       │
           └────────┴───────┴────────┴───────┴──▶ put back: the policy as before, the version discarded

Where no version is evaluated all of that up to the flip is one trip to the device.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from mlx_parallm.core import BASE_ADAPTER, AdapterRef, CheckpointCard, UpdateReport
from mlx_parallm.errors import AdapterFileError, ConflictError, InvalidRequestError
from mlx_parallm.rl.archive import Archive, SavedVersion
from mlx_parallm.rl.gate import Gate
from mlx_parallm.rl.lineage import Lineage
from mlx_parallm.rl.parts import Learner, Publish, Publisher
from mlx_parallm.rl.reports import Emit, Reporter
from mlx_parallm.rl.rewards import RewardMemory
from mlx_parallm.rl.samples import UpdateBatch, UpdateOutcome
from mlx_parallm.rl.settings import LoopSettings
from mlx_parallm.rl.snapshot import PolicySnapshot

PolicyOf = Callable[[AdapterRef], Awaitable[PolicySnapshot]]
"""The weights of a live version that no trainer made: a policy without an optimizer's state, at step 0."""

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


class Trainee:
    """One coroutine at a time: the loop's lock sees to it.

    `drifted`: the policy is ahead of the last published version. The *best* version is the one that drew the rewards
    which brought the running mean to its best: the one that was live before that update.

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
        self.archive = Archive(name, parts.publisher, parts.emit)
        self.reports = Reporter(name, parts.emit)
        self._parts = parts
        self._learner = parts.learner
        self._publisher = parts.publisher
        self._serves_base = serves_base
        self._undo: PolicySnapshot | None = None
        self._since_checkpoint = 0

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
        self.archive.set_best(None)
        self.lineage = Lineage(live or BASE_ADAPTER)
        self.reports.step = start.step if start else 0
        if start is not None and card is not None:
            self.memory.restore(card.metrics)
            await self._resume_best(SavedVersion(self.lineage.tip, start))
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

    async def _resume_best(self, start: SavedVersion) -> None:
        """The best version of the run that goes on, or, where its checkpoint is gone, the one it goes on from."""
        best = await self.archive.find_best()
        if best is None:
            self.memory.trend.forget_best()
        self.archive.set_best(best or start, saved=True)

    async def _publish_first(self) -> None:
        async with self._staged() as ref:
            await self._publisher.flip(ref)
            self.lineage.append(ref)

    # -- an update -------------------------------------------------------------------------------

    async def mark_best(self) -> None:
        """Remembers the version that is live, where the rewards that it drew brought the running mean to its best."""
        if not self.drifted and self.memory.trend.mark_best():
            self.archive.set_best(SavedVersion(self.lineage.tip, await self._settled()))

    @property
    def rewards_fell(self) -> bool:
        """Whether it is time to go back to the best version."""
        drop = self._parts.settings.rollback_drop
        return drop is not None and self.archive.best is not None and self.memory.trend.fell_by(drop)

    async def learn(self, batch: UpdateBatch, publish: bool = True, tag: str | None = None) -> UpdateReport:
        """One update. What does not end published or trained leaves policy and versions as before.

        Raises:
            Exception: learner's or publisher's; policy and versions are as before.
        """
        self._undo = await self._settled()
        try:
            return await self._attempt(batch, publish, tag)
        finally:
            await self._put_back()

    async def _attempt(self, batch: UpdateBatch, publish: bool, tag: str | None) -> UpdateReport:
        gate = self._parts.gate
        at_once = self._at_once() if publish and not gate.evaluates else None
        outcome, live = await self._learner.learn(self.name, batch, at_once)
        if outcome.skipped:
            return self.reports.skipped(self.live, outcome.skipped, metrics=outcome.metrics)
        if refusal := gate.judge(outcome.metrics):
            return self.reports.held(self.live, refusal, outcome)
        if live is not None:
            return await self._with_checkpoint(live, self._learnt(outcome, live), tag)
        if not publish and tag is None:
            return self._learnt(outcome, None)
        async with self._staged() as ref:
            if refusal := await gate.evaluated(ref):
                return self.reports.held(self.live, refusal, outcome)
            if publish:
                await self._publisher.flip(ref)
            report = self._learnt(outcome, ref if publish else None)
            return await self._with_checkpoint(ref, report, tag)

    def _at_once(self) -> Publish:
        gate = self._parts.gate
        return self._publisher.at_once(
            self.name, lambda outcome: not outcome.skipped and gate.judge(outcome.metrics) is None, self.lineage.expect
        )

    def _learnt(self, outcome: UpdateOutcome, published: AdapterRef | None) -> UpdateReport:
        """From here on the policy is what the books say."""
        self._undo = None
        self._since_checkpoint += 1
        self.drifted = published is None
        if published is not None:
            self.lineage.append(published)
        return self.reports.learnt("published" if published else "trained", published or self.live, outcome)

    async def _with_checkpoint(self, ref: AdapterRef, report: UpdateReport, tag: str | None) -> UpdateReport:
        if tag is None and self._since_checkpoint < self._parts.settings.checkpoint_interval:
            return report
        self._since_checkpoint = 0
        version = SavedVersion(ref, await self._learner.snapshot(self.name))
        name = await self.archive.save(version, {**report.metrics, **self.memory.to_metrics()}, [tag] if tag else [])
        return replace(report, checkpoint=name)

    @asynccontextmanager
    async def _staged(self, policy: PolicySnapshot | None = None) -> AsyncIterator[AdapterRef]:
        """A new version of the learner's policy, or of `policy`; forgotten unless it is the lineage's last after."""
        ref = await self._publisher.stage(self.name, self.lineage.expect, policy)
        try:
            yield ref
        finally:
            if self.lineage.tip != ref:
                self._publisher.discard(ref)

    # -- on request ------------------------------------------------------------------------------

    async def save(self, step: int | None, tags: Sequence[str], metrics: Mapping[str, float]) -> CheckpointCard:
        """The policy as it is, and the optimizer's state; a policy that was not published gets a version for it.

        Raises:
            ConflictError: the policy is equal to the base; `step` is taken.
            InvalidRequestError: no checkpoint folder is configured.
            Exception: publisher's.
        """
        policy, metrics = await self._settled(), {**metrics, **self.memory.to_metrics()}
        if self.drifted:
            async with self._staged() as ref:
                card = await self.archive.write(SavedVersion(ref, policy), metrics, tags, step)
        elif self.lineage.tip == BASE_ADAPTER:
            raise ConflictError(f"{self.name!r} is equal to the base model as yet: there is nothing to save.")
        else:
            card = await self.archive.write(SavedVersion(self.lineage.tip, policy), metrics, tags, step)
        if card is None:
            raise InvalidRequestError("This server keeps no checkpoints; start it with --checkpoint-dir.")
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
            self.reports.step = goal.policy.step
            self._parts.emit("rollback", adapter=self.name, version=str(ref), step=goal.policy.step)
            await self._go_on_from(goal, ref)
        return ref

    async def _go_live_again(self, goal: SavedVersion) -> AdapterRef:
        """The base cannot be what the name means: a version equal to it is."""
        if goal.ref != BASE_ADAPTER:
            await self._publisher.flip(goal.ref)
            self.lineage.back_to(goal.ref)
            return goal.ref
        async with self._staged(goal.policy) as ref:
            await self._publisher.flip(ref)
            self.lineage.back_to(BASE_ADAPTER)
            self.lineage.append(ref)
            return ref

    async def _go_on_from(self, goal: SavedVersion, ref: AdapterRef) -> None:
        """A restart does too: the best version is saved, where it was in memory only, and its checkpoint the latest."""
        if goal is self.archive.best:
            best = SavedVersion(ref, goal.policy)
            self.archive.set_best(best)
            checkpoint = await self.archive.save(best, self.memory.to_metrics())
        else:
            card = self.archive.checkpoint_of(ref)
            checkpoint = card.name if card else None
        if checkpoint is not None:
            await self.archive.go_on_from(checkpoint)

    async def _settled(self) -> PolicySnapshot:
        """The policy as the books have it, with the learner."""
        if self._undo is None:
            return await self._learner.snapshot(self.name)
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
