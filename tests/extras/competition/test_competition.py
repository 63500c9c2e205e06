"""Versions that compete on a tiny model: requests are shared, the winner is live for all, and nothing is left."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tiny import save_tiny

from mlx_parallm.app.build import RunningEngine, Served
from mlx_parallm.config import LoRAConfig, RLConfig, configure
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import (
    CollectionSpec,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    StopParams,
)
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import ConflictError
from mlx_parallm.extras.competition.comparison import ComparisonSpec
from mlx_parallm.extras.competition.service import CompetitionService
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.status import TrainingEvent

pytestmark = pytest.mark.ci

LORA = LoRAConfig(rank=4, alpha=8.0)
GIVEN = (GivenTrajectory((5, 6), (7,), 1.0), GivenTrajectory((5, 6), (8,), 0.0))
QUICK = {"rl_training__competition__smallest_effect": 0.9, "rl_training__competition__share": 0.5}


@dataclass
class Rig:
    """A whole engine without HTTP. `drew`: answers by version. `failed`: what requests failed with."""

    engine: RunningEngine
    served: Served
    service: TrainingService
    drew: Counter[AdapterRef] = field(default_factory=Counter)
    failed: list[Exception] = field(default_factory=list)
    events: list[TrainingEvent] = field(default_factory=list)

    @property
    def competition(self) -> CompetitionService:
        competition: CompetitionService = self.service.extras["competition"]
        return competition

    async def request(self, number: int, rewards: dict[AdapterRef, float], user: str = "") -> AdapterRef:
        """One collected request for the default adapter, rewarded by the version that answers."""
        with self.served.adapters.lease(None, user or f"user {number}") as adapter:
            request = GenerationRequest(
                request_id=f"r{number}",
                prompts=((5, 6, 7 + number % 5),),
                sampling=SamplingParams(seed=number),
                stopping=StopParams(3),
                adapter=adapter,
                collection=CollectionSpec(),
            )
            async for event in self.service.trajectories.collect(request, self.served.engine.generate(request)):
                if isinstance(event, RequestFailed):
                    self.failed.append(event.error)
                if isinstance(event, RequestFinished):
                    self.drew[adapter] += 1
                    if self.competes and adapter in rewards:
                        with suppress(ConflictError):  # the comparison ended meanwhile, and this version has lost
                            await self.service.trajectories.feedback(event.trajectory_ids[0], rewards[adapter])
        return adapter

    @property
    def competes(self) -> bool:
        return any(card.verdict == "running" for card in self.competition.cards())

    async def until_the_end(self, rewards: dict[AdapterRef, float]) -> str:
        """Three clients ask until the comparison ends. Returns its verdict."""
        numbers = iter(range(20_000, 30_000))

        async def client() -> None:
            while self.competes:
                await self.request(next(numbers), rewards)

        await asyncio.gather(*(client() for _ in range(3)))
        assert self.failed == []
        return self.competition.cards()[0].verdict

    async def until_it_competes(self) -> None:
        """Requests and their rewards, until an update's version is compared with the one before."""
        numbers, alternating = iter(range(50_000, 60_000)), iter([1.0, -1.0] * 100)
        while not self.competes:
            await self.request(next(numbers), {})
            newest = self.service.trajectories.buffer.newest(1)[0][0].trajectory_id
            if not self.competes:
                await self.service.trajectories.feedback(newest, next(alternating))
            await asyncio.sleep(0)

    async def published(self) -> AdapterRef:
        report = await self.service.update(given=GIVEN)
        assert report.adapter is not None
        return report.adapter

    @property
    def live(self) -> AdapterRef | None:
        return self.served.adapters.live("default")

    async def assert_nothing_is_left(self) -> None:
        """Everybody gets the live version, and the bank, the names and the buffer agree."""
        await self.service.pause()
        await self.service.loop().settled()
        assert {await self.request(10_000 + number, {}) for number in range(8)} == {self.live}
        assert all(card.leases <= 1 for card in self.served.adapters.cards())
        assert self.served.adapters.stats().slots_pinned == 0
        store = self.served.adapters._store
        await self.engine.processor.run(store.check_integrity)
        store.registry.check_integrity()
        self.service.check_integrity()


@asynccontextmanager
async def rig(path: Path, **keys: object) -> AsyncIterator[Rig]:
    save_tiny("llama", path / "model")
    settings = RLConfig(learning_rate=3e-3, batch_size=4, max_staleness=1)
    keys = {"server__kv_cache_memory": "16MB", "debug__check_when_idle": True, **QUICK, **keys}
    engine = RunningEngine(
        configure(path / "model", LORA, settings, checkpointing__checkpoint_dir=str(path / "run"), **keys)
    )
    served = await asyncio.to_thread(engine.start)
    assert served.training is not None
    made = Rig(engine, served, served.training)
    served.training.add_sink(made.events.append)
    await made.service.start_adapter("default")
    try:
        yield made
    finally:
        await made.service.close()
        await asyncio.to_thread(engine.stop)


async def two_versions(made: Rig) -> tuple[AdapterRef, AdapterRef]:
    """The live version, and the one before it, which `checkpoint-1` has."""
    older = await made.published()
    await made.service.save(None, None, (), {})
    return await made.published(), older


@pytest.mark.parametrize("candidate_is_better", [True, False])
async def test_the_winner_is_live_for_all(tmp_path: Path, candidate_is_better: bool) -> None:
    async with rig(tmp_path) as made:
        await made.service.pause()
        live, candidate = await two_versions(made)
        started = await made.competition.start(None, ComparisonSpec("checkpoint-1"))
        assert (started.live, started.candidate) == (live, candidate)
        rewards = {live: 0.0, candidate: 1.0 if candidate_is_better else -1.0}
        verdict = await made.until_the_end(rewards)
        winner = candidate if candidate_is_better else live
        assert verdict == ("promoted" if candidate_is_better else "withdrawn")
        assert made.live == made.service.loop().training.versions.latest == winner
        assert min(made.drew[live], made.drew[candidate]) >= 5
        assert [e.kind for e in made.events if e.kind.startswith("comparison")] == [
            "comparison_started",
            "comparison_ended",
        ]
        await made.assert_nothing_is_left()
        after = await made.published()
        assert after.version > max(live.version, candidate.version)


async def test_users_stay_with_their_version_and_training_waits(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        live, candidate = await two_versions(made)
        await made.competition.start(None, ComparisonSpec(str(candidate)))
        even = {live: 0.5, candidate: 0.5}
        for user in ("ann", "bob", "cho", "dan"):
            assert len({await made.request(hash((user, n)) % 10**6, even, user) for n in range(3)}) == 1
        with pytest.raises(ConflictError, match="being compared"):
            await made.service.update()
        with pytest.raises(ConflictError, match="being compared"):
            await made.service.rollback()
        with pytest.raises(ConflictError, match="being compared"):
            await made.served.adapters.unload(str(candidate))
        assert made.service.status().updates_total == 2, "twelve rewards would have been enough for three updates"
        await made.service.pause()
        await made.competition.stop(None)
        assert made.live == live
        await made.assert_nothing_is_left()


async def test_every_new_version_has_to_win(tmp_path: Path) -> None:
    """Automatic: an update's version competes with the one before, and training goes back if it does not win."""
    async with rig(tmp_path, rl_training__competition__automatic=True) as made:
        first = await made.published()
        await made.until_it_competes()
        (card,) = made.competition.cards()
        assert (card.live, card.automatic) == (first, True)
        assert made.live == card.candidate
        await made.service.pause()  # so that no other update begins the next comparison
        assert await made.until_the_end({card.live: 1.0, card.candidate: -1.0}) == "withdrawn"
        assert made.live == first
        await made.assert_nothing_is_left()


async def test_after_a_restart_that_comes_too_late_the_version_before_is_live(tmp_path: Path) -> None:
    """The hours are used up, so training goes on from there."""
    automatic = {"rl_training__competition__automatic": True}
    async with rig(tmp_path, **automatic) as made:
        incumbent = await made.published()
        await made.until_it_competes()
    async with rig(tmp_path, rl_training__competition__max_hours=1e-6, **automatic) as made:
        async with asyncio.timeout(30):
            while made.competes:
                await asyncio.sleep(0.01)
        (card,) = made.competition.cards()
        assert (card.verdict, made.live) == ("no_difference", incumbent)
        await made.assert_nothing_is_left()


async def test_after_a_restart_a_new_version_still_has_to_win(tmp_path: Path) -> None:
    automatic = {"rl_training__competition__automatic": True}
    async with rig(tmp_path, **automatic) as made:
        incumbent = await made.published()
        await made.until_it_competes()
        candidate = made.live
    async with rig(tmp_path, **automatic) as made:
        (card,) = made.competition.cards()
        assert (card.live, card.candidate, card.verdict) == (incumbent, candidate, "running")
        assert {await made.request(number, {}) for number in range(30)} == {incumbent, candidate}
        await made.service.pause()
        assert await made.until_the_end({incumbent: 0.0, candidate: 1.0}) == "promoted"
        assert made.live == candidate
        await made.assert_nothing_is_left()
    async with rig(tmp_path, **automatic) as made:
        assert not made.competes, "it has won already"
        assert made.live == candidate
