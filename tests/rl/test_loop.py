"""When an adapter is updated, and what it learns from."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from configs import changed, loss_config
from rl.fakes import trajectories
from rl.rig import NAME, SETTINGS, opened, ref, running, settle
from sample_parts import advantage, answer, drawn_logprobs

from mlx_parallm.config import Algorithm
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import (
    EngineDeadError,
    InvalidRequestError,
    UnknownModelError,
)
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup, TrajectoryState


async def test_an_update_begins_when_complete_groups_hold_enough_trajectories() -> None:
    rig = await opened()
    async with running(rig):
        first = rig.drawn(1.0, 0.0, 0.5)
        await settle()
        assert rig.learner.batches == []
        second = rig.drawn(1.0, 0.0, by=BASE_ADAPTER)
        await settle()
        assert len(rig.learner.batches) == 1
    batch = rig.learner.batches[0]
    assert [advantage(sample) for sample in batch.samples] == [0.5, -0.5, 0.0, 0.5, -0.5]
    assert [sample.group for sample in batch.samples] == [0, 0, 0, 1, 1]
    assert [answer(s) for s in batch.samples[:2]] == [m.trajectory.completion_ids for m in first.members[:2]]
    assert drawn_logprobs(batch.samples[0]) == [-0.5, -1.0]
    assert batch.metrics["reward_mean"] == 0.5
    assert batch.metrics["reward_std"] == pytest.approx(math.sqrt((0.25 * 4) / 5))
    assert {member.state for group in (first, second) for member in group.members} == {TrajectoryState.TRAINED}
    assert rig.publisher.live(NAME) == ref(1) == rig.training.versions.latest
    assert rig.publisher.versions[ref(1)] == 1.0
    assert rig.kinds == ["update"]
    assert rig.events[-1][1]["version"] == "math@1"
    rig.check()


async def test_staleness_is_bounded_counted_and_told_to_the_trainer() -> None:
    rig = await opened(settings=changed(SETTINGS, max_staleness=1))
    old = [rig.drawn(1.0, 0.0, by=BASE_ADAPTER) for _ in range(4)]
    unscored = TrajectoryGroup(NAME, trajectories("late", BASE_ADAPTER))
    rig.buffer.add(unscored)
    async with running(rig):
        pass
    # two groups were on-policy, two were one version old by then, and the unscored one came to be two
    assert [batch.samples[0].on_policy for batch in rig.learner.batches] == [True, False]
    assert [batch.metrics["staleness"] for batch in rig.learner.batches] == [0.0, 1.0]
    assert [group.members[0].state for group in old] == [TrajectoryState.TRAINED] * 4
    assert [member.reason for member in unscored.members] == [DropReason.STALE] * 2
    assert rig.buffer.drops[NAME] == {DropReason.STALE: 2}
    assert rig.loop.reason_against(BASE_ADAPTER) is DropReason.STALE
    assert rig.loop.reason_against(ref(1)) is None
    assert rig.loop.reason_against(ref(9)) is DropReason.UNKNOWN_VERSION


async def test_single_samples_are_compared_with_their_scorers_past() -> None:
    rig = await opened()
    singles = [rig.drawn(reward, scorer=scorer) for reward, scorer in ((1.0, "math"), (5.0, "exact"), (0.0, "math"))]
    assert (await rig.loop.update(None)).status == "published"
    assert [advantage(sample) for sample in rig.learner.batches[0].samples] == [-1.0]
    assert [group.members[0].reason for group in singles] == [DropReason.SINGLE, DropReason.SINGLE, None]
    rig.drawn(2.0, scorer="math")
    rig.drawn(5.0, scorer="exact")
    await rig.loop.update(None)
    assert [advantage(sample) for sample in rig.learner.batches[1].samples] == [1.5]
    assert rig.buffer.drops[NAME] == {DropReason.SINGLE: 2, DropReason.ZERO_VARIANCE: 1}


async def test_people_are_compared_within_a_group_where_they_tell_samples_apart_and_else_with_their_past() -> None:
    rig = await opened()
    rig.drawn(1.0, 0.0, scorer=None)
    rig.drawn(1.0, 1.0, scorer=None)
    rig.drawn(1.0, 1.0, scorer="exact")
    await rig.loop.update(None)
    advantages = [advantage(sample) for sample in rig.learner.batches[0].samples]
    assert advantages == pytest.approx([0.5, -0.5, 0.5, 0.25])
    assert rig.buffer.drops[NAME] == {DropReason.ZERO_VARIANCE: 2}


async def test_imitation_learns_from_what_is_above_the_threshold() -> None:
    rig = await opened(settings=changed(SETTINGS, loss=loss_config(Algorithm.CROSS_ENTROPY, imitation_threshold=0.5)))
    mixed, bad = rig.drawn(1.0, 0.5, 0.75, -1.0), rig.drawn(0.0, 0.5)
    assert (await rig.loop.update(None)).status == "published"
    assert [answer(sample)[1] for sample in rig.learner.batches[0].samples] == [4, 6]
    assert [m.reason or m.state for m in mixed.members] == ["trained", "low_reward", "trained", "low_reward"]
    assert [m.reason for m in bad.members] == ["low_reward"] * 2
    rig.drawn(0.0)
    assert (await rig.loop.update(None)).reason == "no_signal"
    assert rig.training.rewards.trend.mean is None
    rig.check()


async def test_imitation_of_given_trajectories_needs_no_rewards_and_minds_those_it_gets() -> None:
    rig = await opened(settings=changed(SETTINGS, loss=loss_config(Algorithm.CROSS_ENTROPY)))
    assert (await rig.loop.update([GivenTrajectory((1,), (2, 3))])).status == "published"
    (sample,) = rig.learner.batches[0].samples
    assert (answer(sample), advantage(sample)) == ((2, 3), 1.0)
    await rig.loop.update([GivenTrajectory((1,), (4,), 1.0), GivenTrajectory((1,), (5,), 0.0)])
    assert [answer(sample) for sample in rig.learner.batches[1].samples] == [(4,)]


@pytest.mark.parametrize("given", [[None, None], [1.0, None]])
async def test_rewards_are_given_for_all_where_the_loss_reads_them(given: list[float | None]) -> None:
    rig = await opened()
    with pytest.raises(InvalidRequestError, match="reward"):
        await rig.loop.update([GivenTrajectory((1,), (2,), reward) for reward in given])


async def test_given_trajectories_are_grouped_by_id_or_else_by_prompt() -> None:
    rig = await opened()
    given = [
        GivenTrajectory((1,), (2,), 1.0, "a", (-0.5,)),
        GivenTrajectory((9,), (4,), 4.0),
        GivenTrajectory((1,), (3,), 0.0, "a"),
        GivenTrajectory((9,), (5,), 2.0, temperature=0.5),
        GivenTrajectory((8,), (5,), 2.0),
    ]
    report = await rig.loop.update(given)
    samples = rig.learner.batches[0].samples
    assert [(answer(s), s.group, advantage(s)) for s in samples] == [
        ((2,), 0, 0.5), ((3,), 0, -0.5), ((4,), 1, 1.0), ((5,), 1, -1.0)]  # fmt: skip
    assert [s.on_policy for s in samples] == [False, True, True, True]
    assert [s.sampled[0].temperature for s in samples] == [1.0, 1.0, 1.0, 0.5]
    assert (report.status, report.adapter, report.step) == ("published", ref(1), 1)
    assert rig.buffer.collected == {}


# ---- pauses -------------------------------------------------------------------------------------


async def test_training_pauses_after_so_many_skips_in_a_row_and_resumes_when_asked() -> None:
    rig = await opened(settings=changed(SETTINGS, max_skips=2, update_frequency=2))
    async with running(rig):
        for skip in ("loss_not_finite", ""):  # an update between them breaks the row
            rig.learner.skip = skip
            rig.drawn(1.0, 0.0)
            await settle()
        rig.learner.skip = "gradient_not_finite"
        *_, waiting = [rig.drawn(1.0, 0.0) for _ in range(3)]
        await settle()
        status = rig.loop.status()
        assert status.state == "paused"
        assert status.skips == {"loss_not_finite": 1, "gradient_not_finite": 2}
        assert "gradient_not_finite" in str(status.pause_reason)
        assert waiting.members[0].state is TrajectoryState.SCORED
        rig.learner.skip = ""
        rig.loop.resume()
        await settle()
        assert rig.kinds[-3:] == ["paused", "resumed", "update"]
    assert waiting.members[0].state is TrajectoryState.TRAINED
    rig.check()


async def test_whatever_fails_around_an_update_is_reported_and_the_loop_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as a comparison that cannot begin, because its version was unloaded meanwhile."""
    rig = await opened(settings=changed(SETTINGS, max_skips=3, update_frequency=2))
    failures = 2

    @asynccontextmanager
    async def entry() -> AsyncIterator[None]:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise UnknownModelError("math@1 was unloaded")
        yield

    rig.loop.entry = entry
    async with running(rig):
        rig.drawn(1.0, 0.0)
        await settle()
        assert rig.kinds == ["skipped", "skipped", "update"]
        assert rig.loop.status().skips == {"failed": 2}
        assert caplog.text.count("UnknownModelError: math@1 was unloaded") == 2
        failures = 9
        rig.drawn(1.0, 0.0)
        await settle()
        assert rig.loop.status().state == "paused"
        assert "math@1 was unloaded" in rig.loop.status().pause_reason
        failures = 0
        rig.loop.resume()
        await settle()
        assert rig.kinds[-2:] == ["resumed", "update"], "nothing that waited is lost"
        rig.check()


async def test_an_update_that_the_end_of_the_device_cuts_off_keeps_its_trajectories_for_the_next_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = await opened(settings=changed(SETTINGS, update_frequency=2))
    rig.learner.error = EngineDeadError("it hangs")
    monkeypatch.setattr(rig.loop._changes, "updated", lambda *_: pytest.fail("it is in the journal"))
    group = rig.drawn(1.0, 0.0)
    with pytest.raises(EngineDeadError):
        await rig.loop.update(None)
    async with asyncio.timeout(60):
        await rig.loop.run()  # automatic updates end, too
    assert [member.state for member in group.members] == [TrajectoryState.SCORED] * 2
    rig.check()
