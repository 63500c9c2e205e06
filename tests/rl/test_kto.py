"""The loss of answers that are desirable or not, against its formula in float64, and what an update makes of groups."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from configs import changed, loss_config
from mlx.utils import tree_flatten
from rl.fakes import answers, trajectories
from sample_parts import advantage, answer, with_advantage
from train.loss_reference import Row
from trainers import (
    Recorder,
    assert_close,
    everywhere,
    gradients,
    learn,
    make_policy,
    make_trainer,
    plain_logprobs,
    samples,
    unclipped,
)

from mlx_parallm.config import Algorithm
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import Signal
from mlx_parallm.rl.objectives import ScoredGroup, prepare
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.trajectories import FEEDBACK, DropReason
from mlx_parallm.train.context import Params
from mlx_parallm.train.data import Datum, mismatched
from mlx_parallm.train.policy import Policy
from mlx_parallm.train.trainer import GRPOTrainer

KTO = loss_config(Algorithm.KTO, preference_beta=0.3, kto_desirable_weight=1.5, kto_undesirable_weight=0.5)


# ---- the formula ---------------------------------------------------------------------------------


def rated(seed: int) -> list[Row]:
    """Desirable and undesirable rows of unequal lengths, and one that is neither."""
    rng = np.random.default_rng(seed)
    rows = []
    for at, sign in enumerate((1.0, -1.0, 1.0, 0.0, -1.0)):
        logp, ref = (rng.uniform(-3, -0.5, 2 + at).astype(np.float32).astype(np.float64) for _ in range(2))
        rows.append(Row(logp, logp, logp, ref, np.ones(2 + at), sign, at))
    return rows


# ---- samples of other prompts --------------------------------------------------------------------


def test_every_prompt_gets_the_answer_to_another_one() -> None:
    drawn = samples(7, groups=3)
    answers = {}
    for sample in drawn:
        answers.setdefault(sample.token_ids[: sample.trained()[0]], []).append(answer(sample))
    made = mismatched(drawn)
    assert sorted(answer(each) for each in made) == sorted(answer(each) for each in drawn)
    for each in made:
        assert answer(each) not in answers[each.token_ids[: each.trained()[0]]]
    assert mismatched(drawn[::-1]) == made


# ---- the trainer ---------------------------------------------------------------------------------


def judged(count: int = 6) -> list[Datum]:
    """Desirable and undesirable answers to three prompts."""
    drawn = samples(count, groups=3)
    return [with_advantage(each, 1.0 if at % 2 else -1.0) for at, each in enumerate(drawn)]


def plain_estimate(trainer: GRPOTrainer, model, policy: Policy, drawn: Sequence[Datum]) -> float:
    changes = [
        sum(plain_logprobs(trainer, model, policy.params, each)) - sum(plain_logprobs(trainer, model, None, each))
        for each in mismatched(drawn)
    ]
    return max(0.0, float(np.mean(changes)))


@pytest.mark.parametrize("seed", [5, 7])
@pytest.mark.parametrize("most", [1, 30, 10_000])
def test_the_gradient_is_that_of_plain_forwards(most: int, seed: int) -> None:
    """Differentiated by MLX itself, one sample after the other, with the estimate of plain forwards."""
    trainer, model = make_trainer(unclipped(loss=KTO, micro_batch_tokens=most))
    policy, drawn = make_policy(trainer, moved=0.05, seed=seed), judged()
    estimate = plain_estimate(trainer, model, policy, drawn)
    bases = [sum(plain_logprobs(trainer, model, None, each)) for each in drawn]

    def plain(params: Params) -> mx.array:
        total = mx.array(0.0)
        for sample, base in zip(drawn, bases, strict=True):
            with trainer.model.bank.using(everywhere(params, policy.scale)):
                logits = model(mx.array([sample.token_ids]))[0]
            logprobs = logits - mx.logsumexp(logits, -1, keepdims=True)
            change = logprobs[mx.array(sample.trained()) - 1, mx.array(answer(sample))].sum() - base
            sign, weight = advantage(sample), 1.5 if advantage(sample) > 0 else 0.5
            total = total + weight * (1 - mx.sigmoid(0.3 * sign * (change - estimate))) / len(drawn)
        return total

    want = {name: np.array(leaf) for name, leaf in tree_flatten(mx.grad(plain)(policy.params))}
    assert_close(gradients(trainer, policy, drawn), want, 2e-5)
    metrics = learn(trainer, Recorder(policy), drawn).metrics
    assert metrics["kl_mismatched"] == pytest.approx(estimate, rel=1e-4, abs=1e-4)


# ---- collected groups ----------------------------------------------------------------------------


def test_answers_are_rated_within_their_group_and_single_ones_by_the_threshold() -> None:
    def group(name: str, scorer: str, *rewards: float) -> ScoredGroup:
        return ScoredGroup(answers(*trajectories(name, BASE_ADAPTER, len(rewards))), rewards, scorer, 0, True)

    groups = [
        group("a", "x", 1.0, 0.0, 0.0),
        group("b", "x", 1.0, 1.0),
        group("c", FEEDBACK, 1.0),
        group("d", FEEDBACK, 0.0),
        group("e", FEEDBACK, 1.0, 1.0),
        group("f", "x", 0.4),
    ]
    prepared = prepare(groups, changed(KTO, imitation_threshold=0.3), RewardHistory())
    rated = [(sample.group, advantage(sample)) for sample in prepared.batch.samples]
    assert rated == [(0, 1), (0, -1), (0, -1), (2, 1), (3, -1), (4, 1), (4, 1), (5, 1)]
    assert prepared.drop_reasons == (None, DropReason.ZERO_VARIANCE, *[None] * 4)
    assert prepared.batch.step_scale == pytest.approx(8 / 10)


def late(name: str, reward: float) -> ScoredGroup:
    of_answer = trajectories(name, BASE_ADAPTER, 1)
    return ScoredGroup(answers(*of_answer), (reward,), FEEDBACK, 0, False, signal=Signal.LATE_FEEDBACK)


@pytest.mark.parametrize(("opinions", "weights"), [((1, -1, -1, -1), (3.0, 1 / 3)), ((1, -1), (1.5, 0.5))])
def test_thumbs_up_and_thumbs_down_weigh_the_same_in_sum(opinions: Sequence[int], weights: tuple[float, float]) -> None:
    groups = [late(f"g{number}", opinion) for number, opinion in enumerate(opinions)]
    made = prepare([*groups, late("undecided", 0.0)], KTO, RewardHistory()).batch.loss
    assert made is not None
    assert (made.kto_desirable_weight, made.kto_undesirable_weight) == pytest.approx(weights)
    liked, disliked = opinions.count(1), opinions.count(-1)
    ratio = liked * made.kto_desirable_weight / (disliked * made.kto_undesirable_weight)
    assert ratio == pytest.approx(3.0), "that of the configured weights"
