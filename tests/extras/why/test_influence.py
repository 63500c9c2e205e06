"""Products of gradients: against what a small step of each sample really does to an answer."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from configs import loss_config
from mlx.utils import tree_map
from trainers import (
    LORA,
    finish,
    lazy_logprobs,
    learn,
    learning,
    leaves,
    make_trainer,
    plain_logprobs,
    samples,
    snapshot,
)

from mlx_parallm.config import Algorithm
from mlx_parallm.errors import StepFailedError
from mlx_parallm.extras.why.influence import Push, Term, Weights, alone, influences
from mlx_parallm.train.data import Datum, answered
from mlx_parallm.train.losses import UpdateTotals
from mlx_parallm.train.policy import Policy

ANSWER = answered((7, 8, 9), (30, 31, 32), temperature=0.8)
LOSS = {each: loss_config(each, kl_coef=0.5, entropy_coef=0.1) for each in (Algorithm.GRPO, Algorithm.CROSS_ENTROPY)}


def terms(drawn: list[Datum], algorithm: Algorithm = Algorithm.GRPO) -> list[Term]:
    totals = UpdateTotals.of(drawn)
    return [Term([sample], alone(LOSS[algorithm]), totals, 0.5) for sample in drawn]


def after_small_step(trainer, model, policy: Policy, term: Term, size: float) -> float:
    """The change of the answer's log-probability, divided by the size of the step, when the policy steps along the
    gradient of one term, which plain forwards give, scaled as AdamW would."""
    state, config = policy.state, trainer.config.optimizer
    (sample,), steps = term.data, int(state.optimizer["step"].item())
    bias = 1 - config.beta2**steps if steps else 1.0
    at = sample.trained()
    factors = [sample.advantages[place] / (len(at) * term.totals.sequences) for place in at]
    if term.loss.algorithm is Algorithm.CROSS_ENTROPY:
        factors = [1 / term.totals.weight] * len(at)

    def objective(params):
        return -(lazy_logprobs(trainer, model, params, sample) * mx.array(factors)).sum()

    gradient = mx.grad(objective)(policy.params)
    scaled = {
        path: {
            name: gradient[path][name]
            / (mx.sqrt(state.optimizer[path][name]["v"] / bias) + config.eps if steps else 1.0)
            for name in pair
        }
        for path, pair in policy.params.items()
    }

    def logprob(size: float) -> float:
        moved = tree_map(lambda leaf, way: leaf - size * way, policy.params, scaled)
        return sum(plain_logprobs(trainer, model, moved, ANSWER))

    return (logprob(size) - logprob(-size)) / (2 * size)


@pytest.mark.parametrize("algorithm", LOSS)
@pytest.mark.parametrize("updates", [0, 2])
def test_a_score_is_what_a_small_step_along_the_samples_gradient_does(algorithm: Algorithm, updates: int) -> None:
    trainer, model, policy, drawn = learning(samples())
    for _ in range(updates):
        learn(trainer, policy, drawn)
    asked = terms(drawn, algorithm)
    (found,) = finish(trainer, trainer.run(influences(trainer, Weights(policy.state), ANSWER, asked)))
    assert found.preconditioned == bool(updates)
    assert found.logprob == pytest.approx(sum(plain_logprobs(trainer, model, policy.params, ANSWER)), abs=1e-3)
    size = 1e-4 if updates else 0.1
    noise = 0.02 * max(abs(push.score / term.step) for push, term in zip(found.pushes, asked, strict=True))
    for push, term in zip(found.pushes, asked, strict=True):
        moved = after_small_step(trainer, model, policy, term, size)
        assert push.score / term.step == pytest.approx(moved, rel=0.1, abs=noise)
        assert abs(push.cosine) <= 1
        assert np.sign(push.cosine) == np.sign(push.score)


def test_the_answer_itself_as_a_sample_has_the_cosine_of_its_sign() -> None:
    trainer, _, policy, drawn = learning(samples())
    liked, disliked = (replace(ANSWER, advantages=tuple(sign for _ in ANSWER.token_ids)) for sign in (2.0, -2.0))
    asked = terms([liked, disliked, *drawn])
    (found,) = finish(trainer, trainer.run(influences(trainer, Weights(policy.state), ANSWER, asked)))
    first, second, *others = found.pushes
    assert (first.cosine, second.cosine) == (pytest.approx(1, abs=1e-4), pytest.approx(-1, abs=1e-4))
    assert all(abs(push.cosine) < 0.99 for push in others)


def test_nothing_of_a_policy_changes_and_a_checkpoint_gives_the_same() -> None:
    trainer, _, policy, drawn = learning(samples())
    learn(trainer, policy, drawn)
    copy = snapshot(policy)
    kept = trainer.accumulate(policy, drawn[:3], LOSS[Algorithm.GRPO])
    before = leaves(policy)
    live = trainer.run(influences(trainer, Weights(policy.state), ANSWER, terms(drawn)))
    of_copy, without = (
        Policy(trainer.model.layout, trainer.lora, 0, each).state for each in (copy, replace(copy, optimizer={}))
    )
    saved = trainer.run(influences(trainer, Weights(of_copy), ANSWER, terms(drawn)))
    bare = trainer.run(influences(trainer, Weights(without, policy.state), ANSWER, terms(drawn)))
    _, one, other, third = finish(trainer, kept, live, saved, bare)
    assert one == other == third
    assert leaves(policy).keys() == before.keys()
    assert all((leaves(policy)[name] == leaf).all() for name, leaf in before.items())
    stepped = finish(trainer, trainer.step(policy, trainer.config.optimizer))
    twin, _, policy_twin, _ = learning(samples())
    learn(twin, policy_twin, drawn)
    finish(twin, twin.accumulate(policy_twin, drawn[:3], LOSS[Algorithm.GRPO]))
    assert finish(twin, twin.step(policy_twin, twin.config.optimizer))[0].metrics["loss"] == stepped[0].metrics["loss"]


def test_updates_go_on_beside_it_and_it_can_be_given_up() -> None:
    trainer, _, policy, drawn = learning(samples())
    trainer.pace(1e-6)
    asked = trainer.run(influences(trainer, Weights(policy.state), ANSWER, terms(drawn) * 20))
    units = 0
    while units < 40:
        trainer.advance()
        units += 1
    update = trainer.accumulate(policy, drawn, LOSS[Algorithm.GRPO])
    while not update.done():
        trainer.advance()
    assert not asked.done()
    trainer.cancel(asked)
    assert not trainer.waits()
    with pytest.raises(StepFailedError):
        asked.result(timeout=0)


def test_pairs_are_one_term() -> None:
    trainer, _ = make_trainer(lora=LORA)
    policy = trainer.open("one")
    chosen = answered((7, 8, 9), (30, 31, 32), advantage=1.0)
    rejected = answered((7, 8, 9), (40, 41), advantage=-1.0)
    loss, totals = loss_config(Algorithm.DPO), UpdateTotals(2.0, 5.0)
    pair = Term([chosen, rejected], loss, totals, 1.0)
    (found,) = finish(trainer, trainer.run(influences(trainer, Weights(policy.state), ANSWER, [pair])))
    (push,) = found.pushes
    assert isinstance(push, Push)
    assert push.score > 0, "the answer is the chosen one"
