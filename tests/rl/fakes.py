"""Test doubles of `Learner`, `AdapterService`, `PolicyCheckpoints`, scorers and engine.

A policy is one number; learning adds to it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from configs import TRAINING

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair, Version, VersionInfo
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import CollectionSpec, Event, FinishReason, GenerationRequest
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.engine.figures import EngineStats
from mlx_parallm.errors import AdapterFileError, ConflictError, InvalidRequestError, UnknownModelError
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.groups import Groups
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.scoring.pool import ScoringError
from mlx_parallm.rl.trajectories import Episode, TrajectoryGroup
from mlx_parallm.train.data import UpdateBatch, UpdateOutcome
from mlx_parallm.train.learner import Publish
from mlx_parallm.train.policy import PolicySnapshot


def policy(value: float, step: int) -> PolicySnapshot:
    pair = LoRAPair(np.array([[value]]), np.zeros((1, 1)), 1.0)
    return PolicySnapshot(AdapterWeights({"w": pair}), {"moment": np.array(value)}, step)


def value_of(snapshot: PolicySnapshot) -> float:
    return float(snapshot.weights.pairs["w"].a[0, 0])


class FakeLearner:
    """Each update adds 1. `hold`: updates wait for it; `hold_published`: they wait for it after they were published."""

    def __init__(self) -> None:
        self.policies: dict[str, tuple[float, int]] = {}
        self.batches: list[UpdateBatch] = []
        self.metrics: dict[str, float] = {"loss": 0.5}
        self.skip = ""
        self.error: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.hold_published: asyncio.Event | None = None
        self.busy = 0

    async def open(self, name: str, start: PolicySnapshot | None) -> None:
        self.policies[name] = (value_of(start), start.step) if start else (0.0, 0)

    async def close(self, name: str) -> None:
        del self.policies[name]

    async def learn(
        self, name: str, batch: UpdateBatch, publish: Publish | None = None
    ) -> tuple[UpdateOutcome, AdapterRef | None]:
        outcome = await self._learnt(name, batch)
        await asyncio.sleep(0)
        if publish is None:
            return outcome, None
        live = publish(outcome, policy(*self.policies[name]).weights)
        await asyncio.sleep(0)
        if self.hold_published is not None:
            await self.hold_published.wait()
        return outcome, None if live is None else live.result(timeout=0)

    async def _learnt(self, name: str, batch: UpdateBatch) -> UpdateOutcome:
        self.busy += 1
        assert self.busy == 1, "two updates at a time"
        try:
            self.batches.append(batch)
            value, step = self.policies[name]
            if self.hold is not None:
                await self.hold.wait()
            if self.error is not None:
                raise self.error
            if self.skip:
                return UpdateOutcome(step, self.skip, {"loss": float("nan")})
            self.policies[name] = (value + 1, step + 1)
            return UpdateOutcome(step + 1, "", {**batch.metrics, **self.metrics})
        finally:
            self.busy -= 1

    def state(self, name: str) -> PolicySnapshot:
        return policy(*self.policies[name])

    def weights(self, name: str) -> AdapterWeights:
        return policy(*self.policies[name]).weights

    async def snapshot(self, kept: PolicySnapshot) -> PolicySnapshot:
        return kept

    async def restore(self, name: str, goal: PolicySnapshot | None) -> None:
        self.policies[name] = (value_of(goal), goal.step) if goal else (0.0, 0)


class FakePublisher:
    """`AdapterService` and `PolicyCheckpoints`. `versions`: the policy's number by version; `saved`: checkpoints in
    order, with what is in them."""

    def __init__(self) -> None:
        self.versions: dict[AdapterRef, float] = {}
        self.names: dict[str, AdapterRef] = {}
        self.flips: list[AdapterRef] = []
        self.discarded: list[AdapterRef] = []
        self.kept: Counter[AdapterRef] = Counter()
        self.saved: list[tuple[CheckpointCard, PolicySnapshot]] = []
        self.damaged: set[str] = set()
        self.stages_for_ever = False
        self.flip_error: Exception | None = None
        self.save_error: Exception | None = None
        self.latest = ""
        self._next: Counter[str] = Counter()

    def live(self, name: str) -> AdapterRef | None:
        return self.names.get(name)

    async def keep_live(self, adapter: str) -> None:
        assert adapter in self.names

    def find(self, selector: str) -> AdapterRef:
        for ref in self.versions:
            if selector == str(ref):
                return ref
        raise UnknownModelError(f"no adapter {selector!r}")

    def publish_trained(
        self,
        name: str,
        weights: AdapterWeights,
        info: VersionInfo,
        on_added: Callable[[AdapterRef], None],
        goes_live: bool,
    ) -> Future[AdapterRef]:
        ref, staged = self._added(name, weights), Future[AdapterRef]()
        on_added(ref)
        if self.stages_for_ever:
            return staged
        try:
            if goes_live:
                self._flip(ref)
        except Exception as error:  # noqa: BLE001 - as in the real one, the future has it
            self.discard(ref)
            staged.set_exception(error)
        else:
            staged.set_result(ref)
        return staged

    async def publish(self, name: str, weights: AdapterWeights, info: VersionInfo, goes_live: bool) -> Version:
        assert not goes_live
        ref = self._added(name, weights)
        await asyncio.sleep(0)
        return Version(ref, info)

    def _added(self, name: str, weights: AdapterWeights) -> AdapterRef:
        self._next[name] += 1
        ref = AdapterRef(name, self._next[name])
        self.versions[ref] = float(weights.pairs["w"].a[0, 0])
        return ref

    def number_from(self, name: str, least: int) -> None:
        self._next[name] = max(self._next[name], least - 1)

    async def flip(self, ref: AdapterRef) -> None:
        await asyncio.sleep(0)
        self._flip(ref)

    def _flip(self, ref: AdapterRef) -> None:
        if self.flip_error is not None:
            raise self.flip_error
        assert np.isfinite(self.versions[ref])
        self.names[ref.name] = ref
        self.flips.append(ref)

    def restored(self, ref: AdapterRef, held: PolicySnapshot) -> None:
        """A checkpoint's version is live when the process starts."""
        self.versions[ref] = value_of(held)
        self.names[ref.name] = ref
        self.flips.append(ref)
        self._next[ref.name] = ref.version

    def discard(self, ref: AdapterRef) -> None:
        """Forgets a version, if it is still known; if it is live, the version before it is live again."""
        if self.versions.pop(ref, None) is None:
            return
        self.discarded.append(ref)
        if self.names.get(ref.name) == ref:
            del self.names[ref.name]
            self.names.update({earlier.name: earlier for earlier in self.flips if earlier in self.versions})

    @contextmanager
    def lease(self, selector: str) -> Iterator[AdapterRef]:
        ref = next((ref for ref in (*self.versions, BASE_ADAPTER) if selector in (str(ref), "base")), None)
        if ref is None:
            raise UnknownModelError(selector)
        self.kept[ref] += 1
        yield ref
        self.kept[ref] -= 1

    async def save(
        self,
        ref: AdapterRef,
        policy: PolicySnapshot,
        tags: Sequence[str],
        metrics: Mapping[str, float],
        step: int | None = None,
    ) -> CheckpointCard:
        await asyncio.sleep(0)
        if self.save_error is not None:
            raise self.save_error
        assert self.versions[ref] == value_of(policy), "another version's policy"
        others = [card.step for card, held in self.saved if value_of(held) != value_of(policy)]
        if step is None:
            step = policy.step if policy.step not in others else 1 + max(card.step for card, _ in self.saved)
        card = CheckpointCard(f"checkpoint-{step}", ref, step, "", 0, tuple(tags), dict(metrics))
        if any(other.name == card.name and value_of(held) != value_of(policy) for other, held in self.saved):
            raise ConflictError(card.name)
        for other, _ in self.saved:  # the content is the same: the checkpoint keeps its version and metrics
            if (other.adapter.name, other.name) == (ref.name, card.name):
                card = replace(other, tags=card.tags)
                break
        self.saved.append((card, policy))
        self.latest = card.name
        return card

    async def set_latest(self, name: str, checkpoint: str) -> None:
        assert checkpoint in [card.name for card in self.cards(name)]
        self.latest = checkpoint

    def cards(self, name: str) -> tuple[CheckpointCard, ...]:
        return tuple(card for card, _ in self.saved if card.adapter.name == name)

    async def load(self, name: str, which: str) -> tuple[AdapterRef, PolicySnapshot]:
        for card, held in reversed(self.saved):
            if card.adapter.name == name and (card.name == which or which in card.tags):
                if card.name in self.damaged:
                    raise AdapterFileError("no trainer state")
                self.versions.setdefault(card.adapter, value_of(held))
                return card.adapter, held
        raise UnknownModelError(which)


class FakeScorers:
    """`rewards`: by text; a text that is missing there fails its group. `gate`: scores nothing until it is set."""

    def __init__(self, rewards: Callable[[Trajectory], float] | None = None) -> None:
        self.rewards = rewards
        self.gate: asyncio.Event | None = None

    async def close(self) -> None:
        pass

    async def check(self, collection: CollectionSpec) -> None:
        if collection.scorer == "unknown":
            raise InvalidRequestError("unknown scorer", param="scoring_function")

    async def score(self, group: Sequence[Trajectory]) -> tuple[float, ...]:
        if self.gate is not None:
            await self.gate.wait()
        if self.rewards is None:
            raise ScoringError("it threw")
        return tuple(map(self.rewards, group))


def groups_of(buffer: TrajectoryBuffer) -> Groups:
    """What changes the groups of a buffer, with no scorer, no journal and nobody who listens."""
    return Groups(buffer, FakeScorers(), TRAINING, Journal(), lambda group: None, lambda kind, **data: None)


def set_scores(group: TrajectoryGroup, rewards: Sequence[float]) -> None:
    """Sets a scorer's rewards."""
    for member, reward in zip(group.members, rewards, strict=True):
        member.score(reward)


class FakeEngine:
    """Plays these events for every request; `closed` counts iterators that were closed early."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.closed = 0

    def stats(self) -> EngineStats:
        return EngineStats(alive=True, ready=True)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        for number, event in enumerate(self.events):
            try:
                yield event
            except GeneratorExit:
                self.closed += number + 1 < len(self.events)
                raise


def trajectories(
    group: str,
    adapter: AdapterRef,
    n: int = 2,
    scorer: str | None = "exact",
    metadata: Mapping[str, object] | None = None,
) -> list[Trajectory]:
    return [
        Trajectory(
            trajectory_id=f"{group}-{index}",
            group_id=group,
            group_size=n,
            adapter=adapter,
            prompt_ids=(1, 2),
            completion_ids=(3, index + 4),
            sampling_logprobs=(-0.5, -1.0),
            temperature=1.0,
            text=f"{group} {index}",
            finish_reason=FinishReason.STOP,
            collection=CollectionSpec(scorer, metadata or {}),
            created=0.0,
        )
        for index in range(n)
    ]


def answers(*each: Trajectory) -> tuple[Episode, ...]:
    """Episodes of one turn."""
    return tuple(Episode((one,)) for one in each)
