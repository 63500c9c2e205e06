"""Answers that all earn the same part of the reward: it is noticed and shown, and updates look for a way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from configs import TRAINING
from rl.fakes import answers, set_scores, trajectories
from rl.rig import NAME, Rig, opened, running, settle

from mlx_parallm.config import PlateauConfig
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import FinishReason
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.objectives import PreparedUpdate, ScoredGroup, prepare
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.trajectories import TrajectoryGroup
from mlx_parallm.rl.updates.plateau import Plateau

VERSION = AdapterRef(NAME, 1)


def watched(**fields: Any) -> tuple[Plateau, list[tuple[str, dict[str, object]]]]:
    """A plateau of updates of four answers, and the events it emits."""
    events: list[tuple[str, dict[str, object]]] = []
    config = PlateauConfig(**fields)
    return Plateau(NAME, config, lambda kind, **data: events.append((kind, data)), lambda: 4), events


def scored(*rewards: float) -> ScoredGroup:
    return ScoredGroup(answers(*trajectories("g", VERSION, len(rewards))), rewards, "exact")


def observe(plateau: Plateau, *groups: Sequence[float]) -> Plateau:
    for rewards in groups:
        plateau.observe(scored(*rewards))
    return plateau


# ---- what is a plateau ---------------------------------------------------------------------------


def test_it_begins_after_two_updates_of_equal_rewards_and_ends_when_they_differ() -> None:
    plateau, events = watched()
    observe(plateau, (0.3,) * 4)
    assert (plateau.level, plateau.advice, events) == (None, "", [])
    observe(plateau, (0.3,) * 4)
    assert plateau.level == 0.3
    assert "100% of the last 8 answers earned 0.3" in plateau.advice
    observe(plateau, (0.3,) * 4)
    assert [kind for kind, _ in events] == ["plateau"], "reported once"
    assert events[0][1] == {"adapter": NAME, "reward": 0.3, "reason": plateau.advice}
    observe(plateau, (0.3, 0.3, 0.3, 1.0))
    assert (plateau.level, plateau.advice) == (None, "")
    assert [kind for kind, _ in events] == ["plateau", "plateau_ended"]


@pytest.mark.parametrize(
    ("rewards", "level"),
    [
        ((0.3,) * 19 + (0.0,), 0.3),  # nearly all
        ((0.3,) * 16 + (0.0,) * 4, None),  # the groups of many of them still have a signal
        ((0.0,) * 20, 0.0),
        ((1.0,) * 20, None),  # solved
        ((5.0,) * 20, None),
        (tuple(np.linspace(0, 1, 20)), None),
    ],
)
def test_what_is_one(rewards: Sequence[float], level: float | None) -> None:
    plateau, _ = watched(updates=5)
    observe(plateau, *np.reshape(rewards, (5, 4)).tolist())
    assert plateau.level == level


def test_nothing_is_known_of_a_way_out_if_no_answer_has_ever_earned_anything() -> None:
    plateau, _ = watched()
    observe(plateau, (0.0,) * 4, (0.0,) * 4)
    assert not plateau.explores
    assert "None of the last 8 answers earned a reward" in plateau.advice
    observe(plateau, (0.0, 0.0, 0.0, 1.0), (0.0,) * 4, (0.0,) * 4)
    assert plateau.explores


def test_it_gives_up_after_some_updates_since_rewards_may_be_the_same_whatever_the_answers_are() -> None:
    plateau, _ = watched(explore_updates=3)
    tries = [observe(plateau, (0.5,) * 4).explores for _ in range(8)]
    assert tries == [False, True, True, True, False, False, False, False]
    assert "earned 0.5" in plateau.advice
    observe(plateau, (0.5, 0.5, 0.0, 0.0), (0.5,) * 4, (0.5,) * 4)
    assert plateau.explores, "rewards have differed"
    assert not observe(watched(explore_updates=0)[0], (0.5,) * 4, (0.5,) * 4).explores


# ---- the batch of an update that explores --------------------------------------------------------


def of_lengths(*lengths: int, cut_off: Sequence[int] = ()) -> tuple[Trajectory, ...]:
    return tuple(
        replace(
            one,
            completion_ids=tuple(range(3, 3 + length)),
            sampling_logprobs=(-1.0,) * length,
            finish_reason=FinishReason.LENGTH if at in cut_off else FinishReason.STOP,
        )
        for at, (one, length) in enumerate(zip(trajectories("g", VERSION, len(lengths)), lengths, strict=True))
    )


def prepared(*groups: ScoredGroup) -> PreparedUpdate:
    return prepare(groups, TRAINING.loss, RewardHistory(), explores=True)


def test_of_answers_that_earn_the_same_the_shorter_ones_are_better() -> None:
    group = ScoredGroup(answers(*of_lengths(8, 3, 8, 5, 2, cut_off=(0,))), (0.3, 0.3, 0.3, 0.3, 0.0), "exact")
    made = prepared(group)
    cut_off, short, long, middle, failed = made.advantages[0].values
    assert short > middle > long > cut_off > failed
    assert sum(made.advantages[0].values) == pytest.approx(0)
    assert (made.batch.step_scale, made.drop_reasons) == (1.0, (None,))


# ---- in training ---------------------------------------------------------------------------------


def sampled(rig: Rig, rewards: Sequence[float], lengths: Sequence[int]) -> None:
    """A complete group of the last version, of answers of these lengths."""
    rig.groups += 1
    members = [
        replace(
            one, trajectory_id=f"g{rig.groups}-{at}", group_id=f"g{rig.groups}", adapter=rig.training.versions.latest
        )
        for at, one in enumerate(of_lengths(*lengths))
    ]
    group = TrajectoryGroup(NAME, members)
    rig.buffer.add(group)
    set_scores(group, rewards)
    rig.loop.wake()


def test_an_update_of_which_all_was_forgotten_teaches_nothing() -> None:
    made = prepare([], TRAINING.loss, RewardHistory(), explores=True)
    assert (made.batch.samples, made.advantages) == ((), ())


async def test_updates_look_for_a_way_out_until_rewards_differ_again() -> None:
    rig = await opened()
    async with running(rig):
        sampled(rig, (0.3,) * 4, (2, 3, 4, 5))
        await settle()
        assert rig.learner.batches == [], "equal rewards teach nothing"
        for _ in range(2):
            sampled(rig, (0.3,) * 4, (2, 3, 4, 5))
            await settle()
        assert rig.kinds[-3:].count("update") >= 1
        assert "plateau" in rig.kinds
        assert "earned 0.3" in rig.loop.status().advice
        explored = len(rig.learner.batches)
        assert {sample.advantages[2] > 0 for sample in rig.learner.batches[-1].samples} == {True, False}
        sampled(rig, (0.3, 0.3, 1.0, 0.3), (2, 3, 4, 5))
        await settle()
        assert (rig.kinds.count("plateau_ended"), rig.loop.status().advice) == (1, "")
        best = max(rig.learner.batches[explored].samples, key=lambda sample: sample.advantages[-1])
        assert len(best.token_ids) == 2 + 4, "by its reward, not by its length"
        for _ in range(2):
            sampled(rig, (0.3,) * 4, (2, 3, 4, 5))
            await settle()
        best = max(rig.learner.batches[-1].samples, key=lambda sample: sample.advantages[-1])
        assert (len(best.token_ids), best.sampling_logprobs) == (2 + 4, ()), "the one that earned more, again"
    rig.check()
