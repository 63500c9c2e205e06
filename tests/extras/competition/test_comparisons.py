"""Comparisons of two versions: who gets which, how they end, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from rl.fakes import trajectories

from mlx_parallm.config import CompetitionConfig
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.readers import Reader
from mlx_parallm.errors import ConflictError, InvalidRequestError, UnknownModelError
from mlx_parallm.extras.competition import service as competition
from mlx_parallm.extras.competition.comparison import ComparisonCard, ComparisonSpec
from mlx_parallm.extras.competition.service import CompetitionService
from mlx_parallm.rl.trajectories import TrajectoryGroup, TrajectoryState

LIVE, CANDIDATE, OTHER = (AdapterRef("main", number) for number in (1, 2, 3))
SPEC = ComparisonSpec("main@2")
LATER = math.inf


class FakeVersions:
    def __init__(self) -> None:
        self.splits: dict[str, Callable[[str], AdapterRef]] = {}
        self.leased: Counter[str] = Counter()

    @contextmanager
    def lease(self, selector: str) -> Iterator[AdapterRef]:
        self.leased[selector] += 1
        try:
            yield LIVE
        finally:
            self.leased[selector] -= 1

    def split(self, name: str, choose: Callable[[str], AdapterRef] | None) -> None:
        self.splits.pop(name, None)
        if choose is not None:
            self.splits[name] = choose

    async def stage(self, ref: AdapterRef) -> None:
        pass


class FakeTrained:
    """`steps`: what was asked, in order. `saved`: versions that a checkpoint has."""

    name = "main"

    def __init__(self) -> None:
        self.live: AdapterRef | None = LIVE
        self.saved = {CANDIDATE}
        self.kept: AdapterRef | None = None
        self.held = False
        self.steps: list[object] = []
        self.error: Exception | None = None
        self.settling = asyncio.Event()
        self.settling.set()

    def hold(self) -> None:
        self.held = True

    async def settled(self) -> None:
        await self.settling.wait()

    def release(self) -> None:
        self.held = False

    def pause(self, reason: str) -> None:
        self.steps.append(("pause", reason))

    def version(self, selector: str) -> AdapterRef:
        name, _, number = selector.partition("@")
        if not number:
            raise UnknownModelError(selector)
        return AdapterRef(name, int(number))

    def is_saved(self, ref: AdapterRef) -> bool:
        return ref in self.saved

    def came_from(self, ref: AdapterRef) -> bool:
        return self.live is not None and ref.version == self.live.version - 1

    async def keep(self, ref: AdapterRef) -> None:
        if self.error:
            raise self.error
        assert ref == self.live
        self.steps.append(("keep", ref))
        self.kept = ref

    def incumbent(self) -> AdapterRef | None:
        return self.kept

    async def make_live(self, ref: AdapterRef) -> None:
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        self.steps.append(ref)
        self.live = ref


class Rig:
    def __init__(self, **settings: object) -> None:
        self.versions, self.trained = FakeVersions(), FakeTrained()
        self.events: list[tuple[str, dict[str, object]]] = []
        self.tasks: list[asyncio.Task[None]] = []
        config = CompetitionConfig(**settings)
        self.service = CompetitionService(config, self.find, self.versions, self.emit, self.spawn)

    def find(self, adapter: str | None, reader: Reader) -> FakeTrained:
        if adapter not in (None, "main"):
            raise UnknownModelError(adapter)
        return self.trained

    def emit(self, kind: str, **data: object) -> None:
        self.events.append((kind, data))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    def drawn(self, version: AdapterRef, *rewards: float, created: float = LATER) -> TrajectoryGroup:
        answers = [replace(one, created=created) for one in trajectories("g", version, len(rewards))]
        group = TrajectoryGroup("main", answers)
        for member, reward in zip(group.members, rewards, strict=True):
            member.own_reward, member.state = reward, TrajectoryState.SCORED
        return group

    async def rewarded(self, candidate: float, live: float, rounds: int = 200) -> ComparisonCard:
        """Rewards of both, at most for so many rounds. Returns the card."""
        for _ in range(rounds):
            self.service.observe(self.drawn(CANDIDATE, candidate))
            for _ in range(4):
                self.service.observe(self.drawn(LIVE, live))
        await asyncio.gather(*self.tasks)
        return self.card

    @property
    def card(self) -> ComparisonCard:
        (card,) = self.service.cards()
        return card

    def assert_nothing_is_left(self) -> None:
        self.service.check_integrity()
        assert not +self.versions.leased
        assert not self.versions.splits
        assert not self.trained.held


@asynccontextmanager
async def begun(**settings: object) -> AsyncIterator[Rig]:
    rig = Rig(**settings)
    await rig.service.start(None, SPEC)
    yield rig
    rig.service.close()
    rig.assert_nothing_is_left()


# -- who gets which ------------------------------------------------------------------------------


async def test_a_share_of_the_keys_gets_the_candidate_and_keeps_it() -> None:
    async with begun(share=0.2) as rig:
        choose = rig.versions.splits["main"]
        chosen = {key: choose(key) for key in map(str, range(4000))}
        share = sum(version == CANDIDATE for version in chosen.values()) / 4000
        assert set(chosen.values()) == {LIVE, CANDIDATE}
        assert share == pytest.approx(0.2, abs=0.03)
        assert all(choose(key) == version for key, version in chosen.items())
        (card,) = rig.service.cards()
        drawn = Counter(chosen.values())
        assert (card.live_requests, card.candidate_requests) == (2 * drawn[LIVE], 2 * drawn[CANDIDATE])


# -- how it ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "rewards", "verdict", "reason"),
    [
        ({}, (1.0, 0.0), "promoted", ""),
        ({}, (-1.0, 0.0), "withdrawn", ""),
        ({"smallest_effect": 0.5}, (0.5, 0.5), "no_difference", "smallest_effect"),
        ({"smallest_effect": 0.001, "max_rewards": 7}, (0.5, 0.5), "no_difference", "max_rewards"),
    ],
    ids=["better", "worse", "equal", "used up"],
)
async def test_its_verdict(settings: dict[str, float], rewards: tuple[float, float], verdict: str, reason: str) -> None:
    async with begun(**settings) as rig:
        card = await rig.rewarded(*rewards)
        assert (card.verdict, card.candidate_mean, card.live_mean) == (verdict, *rewards)
        assert reason in card.reason
        assert rig.trained.steps == ([CANDIDATE] if verdict == "promoted" else [])
        assert rig.events[-1][1]["verdict"] == verdict
        rig.assert_nothing_is_left()


async def test_it_ends_when_its_time_is_up() -> None:
    async with begun(max_hours=1e-6) as rig:
        await asyncio.sleep(0.02)
        await asyncio.gather(*rig.tasks)
        assert (rig.card.verdict, rig.trained.live) == ("no_difference", LIVE)
        assert "max_hours" in rig.card.reason


@pytest.mark.parametrize(("hours_ago", "ends"), [(3.0, True), (1.0, False)])
async def test_the_hours_before_a_restart_count(hours_ago: float, ends: bool) -> None:
    """Otherwise one that is cut off each night would hold training for ever."""
    rig = Rig(automatic=True, max_hours=2.0)
    rig.trained.live, rig.trained.kept = CANDIDATE, LIVE
    rig.trained.first_saved = lambda version: time.time() - hours_ago * 3600 if version == CANDIDATE else 0.0
    rig.service.begin_again("main")
    assert (rig.card.verdict, rig.trained.held) == ("running", True)
    await asyncio.sleep(0.02)
    await asyncio.gather(*rig.tasks)
    if ends:
        assert (rig.card.verdict, rig.trained.live) == ("no_difference", LIVE)
        assert "max_hours" in rig.card.reason
        rig.assert_nothing_is_left()
    else:
        assert rig.card.verdict == "running"
        rig.service.close()


async def test_the_hours_in_which_the_machine_sleeps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timers of the loop stand still then."""
    monkeypatch.setattr(competition, "_LOOK_S", 0.001)
    async with begun(max_hours=2.0) as rig:
        now = time.time()
        monkeypatch.setattr(competition.time, "time", lambda: now + 3 * 3600)
        await asyncio.sleep(0.05)
        await asyncio.gather(*rig.tasks)
        assert (rig.card.verdict, rig.trained.held) == ("no_difference", False)


async def test_a_winner_that_cannot_go_live_leaves_all_as_it_was() -> None:
    async with begun() as rig:
        rig.trained.error = ConflictError("the checkpoint was deleted")
        card = await rig.rewarded(candidate=1.0, live=0.0)
        assert card.verdict == "failed"
        assert "the checkpoint was deleted" in card.reason
        assert rig.trained.live == LIVE
        rig.assert_nothing_is_left()


async def test_it_ends_when_somebody_makes_another_version_live() -> None:
    async with begun() as rig:
        rig.trained.live = OTHER
        card = await rig.rewarded(candidate=1.0, live=0.0)
        assert (card.verdict, rig.trained.live, rig.trained.steps) == ("stopped", OTHER, [])
        rig.assert_nothing_is_left()


# -- which rewards count ----------------------------------------------------------------------------


async def test_a_group_counts_once_with_its_mean() -> None:
    async with begun() as rig:
        group = rig.drawn(CANDIDATE, 0.0, 0.5, 1.0)
        rig.service.observe(group)
        rig.service.observe(group)
        assert (rig.card.candidate_rewards, rig.card.candidate_mean) == (1, 0.5)


async def test_what_was_drawn_before_or_by_others_does_not_count() -> None:
    async with begun() as rig:
        rig.service.observe(rig.drawn(LIVE, 1.0, created=0.0))
        rig.service.observe(rig.drawn(OTHER, 1.0))
        mixed = rig.drawn(LIVE, 1.0, 1.0)
        mixed.members[0].turns[0] = replace(mixed.members[0].turns[0], adapter=CANDIDATE)
        rig.service.observe(mixed)
        unrewarded = TrajectoryGroup("main", [replace(one, created=LATER) for one in trajectories("g", LIVE)])
        rig.service.observe(unrewarded)
        assert (rig.card.live_rewards, rig.card.candidate_rewards) == (0, 0)


async def test_rewards_outside_of_the_range_count_as_its_ends() -> None:
    async with begun(lowest_reward=0.0, highest_reward=2.0) as rig:
        rig.service.observe(rig.drawn(LIVE, 100.0))
        rig.service.observe(rig.drawn(CANDIDATE, -1.0))
        assert (rig.card.live_mean, rig.card.candidate_mean, rig.card.clipped) == (2.0, 0.0, 2)


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "error", "match"),
    [
        (ComparisonSpec("main@1"), ConflictError, "live already"),
        (ComparisonSpec("main@3"), ConflictError, "no checkpoint"),
        (ComparisonSpec("other@2"), InvalidRequestError, "no version of 'main'"),
        (ComparisonSpec("nope"), UnknownModelError, "nope"),
        (ComparisonSpec("main@2", smallest_effect=2.0), InvalidRequestError, "range"),
    ],
)
async def test_a_candidate_that_cannot_compete_changes_nothing(
    spec: ComparisonSpec, error: type[Exception], match: str
) -> None:
    rig = Rig()
    with pytest.raises(error, match=match):
        await rig.service.start(None, spec)
    rig.assert_nothing_is_left()
    assert rig.service.cards() == []


async def test_there_is_one_comparison_of_an_adapter_at_a_time() -> None:
    rig = Rig()
    rig.trained.settling.clear()
    first = asyncio.create_task(rig.service.start(None, SPEC))
    await asyncio.sleep(0)
    with pytest.raises(ConflictError, match="being compared"):
        await rig.service.start(None, SPEC)
    rig.trained.settling.set()
    await first
    with pytest.raises(ConflictError, match="being compared"):
        rig.service.check_idle("main")
    rig.service.close()
    rig.service.check_idle("main")


# -- versions that updates make ----------------------------------------------------------------------


async def test_without_a_way_back_training_pauses() -> None:
    rig = Rig(automatic=True)
    rig.trained.error = OSError("disk full")
    async with rig.service.entry("main"):
        pass
    ((step, reason),) = rig.trained.steps
    assert step == "pause"
    assert "disk full" in reason
    rig.assert_nothing_is_left()
