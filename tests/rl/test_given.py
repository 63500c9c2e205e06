"""Rows of tokens and whole episodes that a client gives with an update: masks, advantages, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from configs import changed, loss_config
from rl.rig import NAME, SETTINGS, Rig, opened
from rl.test_recovery import Run
from sample_parts import advantage, answer

from mlx_parallm.config import Algorithm
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.train.data import Datum

ROW = GivenTrajectory(
    (1, 2), (3, 4, 8, 9, 5, 8), 1.0, "a", (-0.3, -0.4, 0.0, 0.0, -0.5, 0.0), 0.5,
    mask=(True, True, False, False, True, False),
)  # fmt: skip
"""Two turns, with the result of a tool between them and after them."""


async def samples_from(*given: GivenTrajectory, rig: Rig | None = None) -> tuple[Datum, ...]:
    rig = rig or await opened()
    report = await rig.loop.update(given)
    assert report.status == "published", report
    return rig.learner.batches[-1].samples


async def test_only_what_the_mask_says_is_trained() -> None:
    row, other = await samples_from(ROW, replace(ROW, reward=0.0))
    assert row.token_ids == (1, 2, 3, 4, 8, 9, 5, 8)
    assert (row.loss_weights, answer(row)) == ((0, 0, 1, 1, 0, 0, 1, 0), (3, 4, 5))
    assert [row.sampling_logprobs[at] for at in row.trained()] == [-0.3, -0.4, -0.5]
    assert [(one.start, one.stop, one.temperature) for one in row.sampled] == [(2, 4, 0.5), (6, 7, 0.5)]
    assert (advantage(row), advantage(other)) == (0.5, -0.5)


async def test_advantages_are_taken_as_they_are_and_the_step_is_whole() -> None:
    rig = await opened()
    each = (0.5, -2.0, 0.0, 0.0, 7.0, 0.0)
    zero = replace(ROW, group_id="b", advantages=(0.0,) * 6)
    row, other = await samples_from(replace(ROW, reward=None, advantages=each), replace(zero, reward=None), rig=rig)
    assert [row.advantages[at] for at in row.trained()] == [0.5, -2.0, 7.0]
    assert advantage(other) == 0.0
    batch = rig.learner.batches[0]
    assert batch.step_scale == 1.0
    assert "reward_mean" not in batch.metrics
    assert batch.metrics["completion_tokens"] == 3


async def test_advantages_of_nothing_but_zeros_teach_nothing() -> None:
    rig = await opened()
    report = await rig.loop.update([replace(ROW, reward=None, advantages=(0.0,) * 6)])
    assert (report.status, report.reason) == ("skipped", "no_signal")


async def test_the_rows_of_an_episode_count_once_and_are_joined_where_they_continue() -> None:
    first = GivenTrajectory((1, 2), (3, 4), None, "a", episode_id="e")
    second = GivenTrajectory((1, 2, 3, 4, 8), (5,), 1.0, "a", episode_id="e")
    apart = GivenTrajectory((6,), (7,), None, "a", episode_id="e")
    one, two, other = await samples_from(first, second, apart, GivenTrajectory((1, 2), (9,), 0.0, "a"))
    assert [(sample.token_ids, advantage(sample)) for sample in (one, two, other)] == [
        ((1, 2, 3, 4, 8, 5), 0.5),
        ((6, 7), 0.5),
        ((1, 2, 9), -0.5),
    ]
    assert {sample.group for sample in (one, two, other)} == {0}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (GivenTrajectory((), (2,)), r"trajectories\[1\]: .* at least one prompt token"),
        (GivenTrajectory((1,), ()), r"trajectories\[1\]: .* one completion token"),
        (GivenTrajectory((1,), (2,), math.nan), r"trajectories\[1\]: reward must be a finite"),
        (GivenTrajectory((1,), (2,), temperature=0.0), r"trajectories\[1\]: temperature must be above 0"),
        (GivenTrajectory((1,), (2, 3), sampling_logprobs=(-0.5,)), r"trajectories\[1\]: 1 sampling_logprobs for 2"),
        (GivenTrajectory((1,), (2,), sampling_logprobs=(-math.inf,)), r"trajectories\[1\]: .* finite"),
        (replace(ROW, mask=(True,)), r"trajectories\[1\]: 1 mask for 6"),
        (replace(ROW, mask=(False,) * 6), r"trajectories\[1\]: give at least"),
        (replace(ROW, advantages=(1.0,)), r"trajectories\[1\]: 1 advantages for 6"),
        (replace(ROW, advantages=(float("nan"),) * 6), r"trajectories\[1\]: .* finite"),
        (replace(ROW, advantages=(1.0,) * 6), "advantages with each of them, or with none"),
        (replace(ROW, reward=None), "a reward with each of them, or with none"),
    ],
)
async def test_what_cannot_be_learnt_from_or_does_not_fit_together_is_refused(bad: GivenTrajectory, says: str) -> None:
    rig = await opened()
    with pytest.raises(InvalidRequestError, match=says):
        await rig.loop.update([ROW, bad])
    assert rig.learner.batches == []


async def test_an_episode_has_one_reward() -> None:
    rig = await opened()
    given = [GivenTrajectory((1,), (2,), reward, "a", episode_id="e") for reward in (1.0, 0.5)]
    with pytest.raises(InvalidRequestError, match=r"'e' has the rewards \[0.5, 1.0\]"):
        await rig.loop.update(given)


@pytest.mark.parametrize("algorithm", [Algorithm.CROSS_ENTROPY, Algorithm.DPO, Algorithm.KTO])
async def test_losses_that_read_no_advantages_refuse_them(algorithm: Algorithm) -> None:
    rig = await opened(settings=changed(SETTINGS, loss=loss_config(algorithm)))
    with pytest.raises(InvalidRequestError, match=f"{algorithm.value} reads no advantages"):
        await rig.loop.update([replace(ROW, reward=None, advantages=(1.0,) * 6)])


async def test_rows_are_trained_on_again_to_the_same_policy_after_a_crash(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    rows = [replace(ROW, reward=None, advantages=(0.5, -2.0, 0.0, 0.0, number, 0.0)) for number in (7.0, 1 / 3)]
    episodes = [replace(ROW, reward=reward, episode_id=name) for name, reward in (("e", 1.0), ("f", 0.0))]
    async with run.process() as one:
        await one.service.update(given=rows)
        await one.service.update(given=episodes)
        before = one.learner.policies["main"]
        batches = [batch.samples for batch in one.learner.batches]
    async with run.process() as again:
        assert again.learner.policies["main"] == before
        assert [batch.samples for batch in again.learner.batches] == batches


async def test_zeros_in_place_of_log_probabilities_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def rows(*logprobs: float) -> list[GivenTrajectory]:
        return [GivenTrajectory((1, 2), (3, 4, 5, 6), reward, "a", logprobs) for reward in (0.0, 1.0)]

    rig = await opened()
    for logprobs in ((-0.1, 0.0, 0.0, 0.0), (), (0.0,) * 4, (0.0,) * 4):
        await rig.loop.update(rows(*logprobs))
    told = [data for kind, data in rig.events if kind == "placeholder_logprobs"]
    assert told == [{"adapter": NAME, "samples": 2}]
    assert caplog.text.count("are 0 at every trained token") == 1
