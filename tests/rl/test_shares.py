"""The shares of API keys in an update, against derivatives of the losses, and what is left of them by a limit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from configs import changed, loss_config
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from rl.service_rig import World, settle, world
from rl.test_groups_of_keys import answer
from rl.test_recovery import MANUAL, Run
from trainers import assert_close, finish, gradients, make_policy, make_trainer, samples

from mlx_parallm.config import Algorithm, ResolvedLoss
from mlx_parallm.core.readers import Reader
from mlx_parallm.core.requests import Signal
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.extras.people.service import Edit
from mlx_parallm.rl.objectives import ScoredGroup
from mlx_parallm.rl.shares import limited, shares_by_owner, shares_of
from mlx_parallm.rl.teachers import taught
from mlx_parallm.rl.trajectories import Episode
from mlx_parallm.train.data import Datum, UpdateBatch, answered
from mlx_parallm.train.losses import TokenBatch, UpdateTotals, loss

ONE, TWO, BOSS = Reader("one"), Reader("two"), Reader("boss", reads_all=True)


# ---- the share of a sample -----------------------------------------------------------------------


def learnt_from(algorithm: Algorithm) -> list[Datum]:
    """Six samples in three pairs, of unequal lengths, weights, advantages and parts of their episodes."""
    rng = np.random.default_rng(7)
    whole = algorithm in (Algorithm.GSPO, Algorithm.DPO, Algorithm.KTO)  # all tokens have the advantage of the answer
    made = []
    for at, length in enumerate((3, 1, 9, 4, 2, 6)):
        value = (1.0, -1.0)[at % 2]
        advantages = [value] * length if whole else rng.integers(-8, 8, length) / 4
        if algorithm is Algorithm.GSPO:
            advantages = [0.25 * (at + 1) * value] * length
        one = answered((1, 2), tuple(range(3, 3 + length)), group=at // 2)
        weights = (0.0, 0.0, *(rng.integers(1, 8, length) / 4))
        share = 1.0 if algorithm is Algorithm.DPO else (0.4, 1.0)[at % 2]
        made.append(replace(one, advantages=(0.0, 0.0, *advantages), loss_weights=weights, share=share))
    return made


def derivatives(data: list[Datum], config: ResolvedLoss) -> list[float]:
    """The sums over the tokens of each sample of |d loss / d log π|, where all policies are the same."""
    width = max(len(one.trained()) for one in data)

    def table(name: str) -> mx.array:
        rows = [[getattr(one, name)[at] for at in one.trained()] for one in data]
        return mx.array([[*row, *[0.0] * (width - len(row))] for row in rows])

    logp = mx.full((len(data), width), -1.0)
    batch = TokenBatch(
        *(logp, logp, logp),
        weights=table("loss_weights"),
        advantages=table("advantages"),
        shares=mx.array([one.share for one in data]),
        loss_scales=mx.ones(len(data)),
        ref_logp=logp,
        groups=mx.array([[float(one.group == group) for one in data] for group in range(3)]),
        teacher_logp=logp + 1.0,
    )
    totals = UpdateTotals.of(data)
    found = mx.grad(lambda x: loss(replace(batch, logp=x), totals, config)[0])(logp)
    return [float(value) for value in mx.abs(found).sum(-1).tolist()]


@pytest.mark.parametrize("algorithm", Algorithm)
def test_shares_are_those_of_the_derivatives_of_the_loss(algorithm: Algorithm) -> None:
    config = loss_config(algorithm, max_completion_tokens=16, kto_undesirable_weight=0.5)
    data = learnt_from(algorithm)
    slopes = derivatives(data, config)
    assert shares_of(data, config) == pytest.approx([slope / sum(slopes) for slope in slopes], rel=1e-5)


def test_a_long_answer_weighs_no_more_where_tokens_are_averaged_in_answers() -> None:
    data = [answered((1,), (2,) * length, advantage=1.0) for length in (1, 9)]
    assert shares_of(data, loss_config(Algorithm.GRPO)) == pytest.approx((0.5, 0.5))
    assert shares_of(data, loss_config(Algorithm.DAPO)) == pytest.approx((0.1, 0.9))


def test_nothing_has_a_share_of_an_update_without_advantages() -> None:
    assert shares_of([answered((1,), (2,)), answered((1,), (3,))], loss_config()) == (0.0, 0.0)


# ---- the limit -----------------------------------------------------------------------------------

OWNERS = ("", None, "ann", "bob", "cyd")
BATCHES = st.lists(st.tuples(st.sampled_from(OWNERS), st.floats(-4, 4), st.integers(1, 6)), min_size=1, max_size=12)


@given(BATCHES, st.sampled_from([0.01, 0.2, 0.5, 0.9, 1.0]), st.sampled_from(Algorithm))
def test_each_key_moves_the_adapter_by_its_share_or_by_the_limit(
    drawn: list[tuple[str | None, float, int]], most: float, algorithm: Algorithm
) -> None:
    config = loss_config(algorithm, max_share_per_key=most)
    data = [answered((1,), (2,) * tokens, advantage=a, group=at) for at, (_, a, tokens) in enumerate(drawn)]
    owners = [owner for owner, _, _ in drawn]
    batch, kept = limited(UpdateBatch(tuple(data), {"groups": 1.0}, 0.5), owners, config)
    shares = shares_of(data, config)
    scaled = [share * sample.loss_scale for share, sample in zip(shares, batch.samples, strict=True)]
    assert sum(scaled) == pytest.approx(sum(shares)), "the gradients are of the size that they had"
    keys = {owner for owner in owners if owner != ""}
    for owner in {*owners}:
        share = sum(each for each, one in zip(shares, owners, strict=True) if one == owner)
        moves = batch.step_scale * sum(each for each, one in zip(scaled, owners, strict=True) if one == owner)
        limit = most if owner in keys else 1.0
        assert moves == pytest.approx(0.5 * min(share, limit), abs=1e-9)
        assert kept[owner] == pytest.approx(min(share, limit), abs=1e-9)
    figures = shares_by_owner(data, owners, config)
    expected = {"keys": len(keys), "largest_key_share": max(figures[key] for key in keys)} if keys else {}
    assert batch.metrics == {"groups": 1.0, **expected}


def test_without_a_limit_nothing_changes() -> None:
    data = tuple(samples(6, groups=3))
    batch, _ = limited(UpdateBatch(data, {}, 0.75), ["ann", "ann", "bob"], loss_config())
    assert all(ours is given for ours, given in zip(batch.samples, data, strict=True))
    assert batch.step_scale == 0.75


def test_one_key_alone_makes_the_step_smaller_and_does_not_change_its_direction() -> None:
    data, config = tuple(samples(6, groups=3)), loss_config(max_share_per_key=0.25)
    batch, _ = limited(UpdateBatch(data), ["ann"] * 3, config)
    assert {sample.loss_scale for sample in batch.samples} == {1.0}
    assert (batch.step_scale, batch.metrics["largest_key_share"]) == (0.25, 1.0)


def test_a_little_of_a_second_key_does_not_stop_the_first_one() -> None:
    data = [answered((1,), (2,), advantage=a, group=at) for at, a in enumerate((0.999, 0.001))]
    batch, kept = limited(UpdateBatch(tuple(data)), ["ann", "bob"], loss_config(max_share_per_key=0.5))
    assert kept == pytest.approx({"ann": 0.5, "bob": 0.001})
    assert batch.step_scale == pytest.approx(0.501)


def test_the_trainer_scales_the_gradient_of_each_sample() -> None:
    """The gradient of a limited update is the sum of those of its keys, each times what the key keeps of its share."""
    trainer, _ = make_trainer()
    policy, data = make_policy(trainer, moved=0.1), samples(6, groups=3)
    config = changed(trainer.config.loss, max_share_per_key=0.3)
    owners = ["ann", "ann", "bob"]
    before = shares_by_owner(data, owners, config)
    assert before["ann"] > 0.5
    batch, _ = limited(UpdateBatch(tuple(data)), owners, config)

    def of(owner: str, given: tuple[Datum, ...]) -> tuple[Datum, ...]:
        """The same data, with nothing to learn but from this key."""
        return tuple(
            one if owners[one.group] == owner else replace(one, advantages=(0.0,) * len(one.advantages))
            for one in given
        )

    whole = gradients(trainer, policy, batch.samples)
    parts = {owner: gradients(trainer, policy, of(owner, tuple(data))) for owner in ("ann", "bob")}
    expected = {
        name: sum(parts[owner][name] * min(before[owner], 0.3) / before[owner] for owner in parts) / batch.step_scale
        for name in whole
    }
    assert_close(whole, expected, 1e-5)


def test_one_key_alone_moves_the_policy_by_its_part_of_the_whole_step() -> None:
    """AdamW would make the same step of a gradient of any size."""
    trainer, _ = make_trainer()
    moves = []
    for most in (1.0, 0.25):
        policy = make_policy(trainer, moved=0.1)
        before = {name: np.array(leaf) for name, leaf in tree_flatten(policy.params)}
        config = changed(trainer.config.loss, max_share_per_key=most)
        batch, _ = limited(UpdateBatch(tuple(samples(6, groups=3))), ["ann"] * 3, config)
        finish(trainer, trainer.begin(policy, batch))
        changes = [np.array(leaf) - before[name] for name, leaf in tree_flatten(policy.params)]
        moves.append(np.concatenate([change.ravel() for change in changes]))
    whole, part = moves
    assert np.linalg.norm(part) == pytest.approx(0.25 * np.linalg.norm(whole), rel=0.01)
    assert np.dot(part, whole) > 0.999 * np.linalg.norm(part) * np.linalg.norm(whole)


def test_samples_that_a_teacher_has_not_scored_are_nobodys_share() -> None:
    data = tuple(answered((1,), (2,), group=at) for at in range(4))
    batch = taught(UpdateBatch(data), ((-1.0,), (), (-1.0,), ()))
    batch, kept = limited(batch, ["ann", "bob", "ann", ""], loss_config(Algorithm.DISTILLATION, max_share_per_key=0.5))
    assert kept == {"ann": 0.5}
    assert (batch.step_scale, batch.metrics["keys"]) == (0.25, 1.0)


# ---- updates of every kind -----------------------------------------------------------------------

HALF = changed(MANUAL, max_share_per_key=0.5)


def of_key(owner: str | None, *rewards: float) -> tuple[GivenTrajectory, ...]:
    prompt = (1, len(owner or ""))
    return tuple(
        GivenTrajectory(prompt, (2, at), reward, group_id=f"of-{owner}", owner=owner)
        for at, reward in enumerate(rewards, 3)
    )


def edit(owner: str, rejected: tuple[int, ...] = (), number: int = 5) -> Edit:
    return Edit("main", (1,), (number, 2), rejected, owner=owner)


async def collected(one: World) -> None:
    for key in ("one", "two"):
        for reward in (1.0, 0.0):
            found = await answer(one, key, group_id="g", group_size=2)
            await one.service.trajectories.feedback(found, reward, reader=Reader(key))


async def rejected_answers(one: World) -> None:
    for owner in ("one", "two"):
        await one.people.edit(edit(owner, (7, 2)))


async def corrections(one: World) -> None:
    for owner in ("one", "two"):
        await one.people.edit(edit(owner))


@pytest.mark.parametrize(
    ("prepared", "signal"),
    [
        (collected, Signal.REWARDS),
        (rejected_answers, Signal.PREFERENCES),
        (corrections, Signal.CORRECTIONS),
    ],
)
async def test_what_waits_is_limited_whatever_it_teaches(prepared, signal: Signal) -> None:
    async with world(changed(HALF, max_share_per_key=0.3)) as one:
        await prepared(one)
        report = await one.service.update()
        assert (report.signal, report.metrics["keys"]) == (signal, 2.0)
        assert report.metrics["largest_key_share"] == pytest.approx(0.5)
        assert one.learner.batches[-1].step_scale == pytest.approx(0.6)


async def test_automatic_updates_are_limited() -> None:
    async with world(changed(HALF, update_frequency=4)) as one:
        for key in ("one", "one"):
            for reward in (1.0, 0.0):
                found = await answer(one, key, group_id=f"g{one.requests // 2}", group_size=2)
                await one.service.trajectories.feedback(found, reward, reader=ONE)
        await settle()
        (batch,) = one.learner.batches
        assert (batch.step_scale, batch.metrics["keys"]) == (0.5, 1.0)


async def test_what_the_server_has_sampled_for_itself_has_no_limit() -> None:
    async with world(HALF) as one:
        await one.request()
        await settle()
        report = await one.service.update()
        assert one.learner.batches[-1].step_scale == 1.0
        assert "keys" not in report.metrics


@pytest.mark.parametrize("most", [0.5, 1.0])
async def test_updates_that_are_made_again_after_a_crash_are_limited_as_they_were(tmp_path: Path, most: float) -> None:
    run = Run(tmp_path / "journal.sqlite", changed(MANUAL, max_share_per_key=most))
    async with run.process() as one:
        await one.service.update(given=[*of_key("one", 5.0, 0.0), *of_key("two", 1.0, 0.0), *of_key(None, 1.0, 0.0)])
        await collected(one)
        await one.service.update()
        await rejected_answers(one)
        await one.service.update(signal=Signal.PREFERENCES)
        policy, batches = one.learner.policies["main"], one.learner.batches
        assert (batches[0].step_scale < 1.0) is (most < 1.0)
    async with run.process() as one:
        assert one.learner.policies["main"] == policy
        assert [(batch.samples, batch.step_scale) for batch in one.learner.batches] == [
            (batch.samples, batch.step_scale) for batch in batches
        ]


def test_a_group_of_several_keys_is_of_no_known_one() -> None:
    def owner(*names: str | None) -> str | None:
        turns = [GivenTrajectory((1,), (2,), owner=name) for name in names]
        return ScoredGroup(tuple(Episode((turn,)) for turn in turns), (), "given").owner

    assert (owner("ann", "ann"), owner("", ""), owner("ann", "bob"), owner(None)) == ("ann", "", None, None)


# ---- the report ----------------------------------------------------------------------------------


def keys(one: World, reader: Reader) -> dict[tuple[str, str | None], tuple[float, float]]:
    found = one.people.signal_report(reader=reader).keys
    assert all(former.share >= latter.share for former, latter in pairwise(found) if latter.whose != "others")
    return {(each.whose, each.key): (each.steps, each.share) for each in found}


async def test_the_report_says_how_far_each_key_has_moved_the_adapter_and_names_no_other_key() -> None:
    async with world(HALF) as one:
        assert keys(one, BOSS) == {}
        one.learner.metrics = {"loss": 0.5, "step_scale": 0.75}  # 0.5 and 0.25 of a step
        await one.service.update(given=[*of_key("one", 3.0, 0.0), *of_key("two", 1.0, 0.0)])
        one.learner.metrics = {"loss": 0.5, "step_scale": 0.5}
        await one.service.update(given=of_key("two", 1.0, 0.0))
        one.learner.metrics = {"loss": 0.5, "step_scale": 0.25}
        await one.service.update(given=of_key(None, 1.0, 0.0))
        one.learner.metrics = {"loss": 0.5, "step_scale": 0.5}
        await one.service.update(given=of_key("", 1.0, 0.0))
        one.learner.skip = "loss_not_finite"
        await one.service.update(given=of_key("two", 1.0, 0.0))
        assert keys(one, BOSS) == {
            ("key", "two"): (0.75, 0.375),
            ("key", "one"): (0.5, 0.25),
            ("server", None): (0.5, 0.25),
            ("unknown", None): (0.25, 0.125),
        }
        own = {("key", "one"): (0.5, 0.25), ("server", None): (0.5, 0.25)}
        assert keys(one, ONE) == {**own, ("others", None): (1.0, 0.5)}
        assert keys(one, Reader("stranger")) == {("server", None): (0.5, 0.25), ("others", None): (1.5, 0.75)}
