"""Losses that are summed over tokens: their values and gradients are those of hand formulas."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from trainers import VOCABULARY, Recorder, assert_close, everywhere, finish, make_policy, make_trainer, unclipped

from mlx_parallm.core.summed import SummedLoss, TargetedTokens, TokenLoss
from mlx_parallm.train.policy import Policy
from mlx_parallm.train.summed import TOTALS, datum_of, loss_value, resolved_loss, scored_positions
from mlx_parallm.train.trainer import GRPOTrainer

LOSSES = (
    SummedLoss(TokenLoss.CROSS_ENTROPY),
    SummedLoss(TokenLoss.IMPORTANCE_SAMPLING),
    SummedLoss(TokenLoss.PPO, 0.8, 1.2),
    SummedLoss(TokenLoss.CISPO, 0.7, 1.1),
    SummedLoss(TokenLoss.CISPO, 0.0, 4.0),
)


def sequences(logprobs: list[np.ndarray] | None = None) -> list[TargetedTokens]:
    """Three sequences. Targets are the next tokens, except in prompts, where they are 0. Advantages have both signs.
    `logprobs`: the policy's, near which the sampler's are."""
    random = np.random.default_rng(1)
    made = []
    for at, (length, prompt) in enumerate(((9, 3), (6, 1), (12, 5))):
        tokens = tuple(int(token) for token in random.integers(1, VOCABULARY, length + 1))
        drawn = np.arange(length) >= prompt
        targets = tuple(int(token) if is_drawn else 0 for token, is_drawn in zip(tokens[1:], drawn, strict=True))
        advantages = tuple(float(value) for value in drawn * random.normal(size=length))
        near = random.normal(size=length, scale=0.4)
        q = () if logprobs is None else tuple(float(value) for value in np.where(drawn, logprobs[at] + near, 0.0))
        made.append(TargetedTokens(tokens[:-1], targets, advantages, q))
    return made


def plain(trainer: GRPOTrainer, model: Any, each: TargetedTokens, params: Any, scale: float) -> mx.array:
    """Logprobs of all targets, from one unpadded row and a full log-softmax."""
    with trainer.model.bank.using(everywhere(params, scale)):
        logits = model(mx.array([each.token_ids]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, -1, keepdims=True)
    return mx.take_along_axis(logprobs, mx.array(each.targets)[:, None], -1)[:, 0]


def by_hand(each: TargetedTokens, logp: np.ndarray, loss: SummedLoss) -> tuple[float, np.ndarray]:
    """The loss, and its derivative with respect to each logprob."""
    a = np.array(each.advantages)
    if loss.name is TokenLoss.CROSS_ENTROPY:
        return -(a * logp).sum(), -a
    r = np.exp(logp - np.array(each.sampling_logprobs))
    clipped = np.clip(r, loss.clip_low, loss.clip_high)
    if loss.name is TokenLoss.IMPORTANCE_SAMPLING:
        return -(r * a).sum(), -r * a
    if loss.name is TokenLoss.PPO:
        return -np.minimum(r * a, clipped * a).sum(), np.where(r * a <= clipped * a, -r * a, 0.0)
    return -(clipped * a * logp).sum(), -clipped * a


@pytest.fixture(scope="module")
def rig() -> tuple[GRPOTrainer, Any, Policy]:
    trainer, model = make_trainer(unclipped(micro_batch_tokens=16))
    return trainer, model, make_policy(trainer, moved=0.05)


@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradient_are_those_of_the_formula(rig: Any, loss: SummedLoss) -> None:
    trainer, model, policy = rig
    scale, params = policy.scale, policy.params
    logprobs = [np.array(plain(trainer, model, each, params, scale)) for each in sequences()]
    given = sequences(None if loss.name is TokenLoss.CROSS_ENTROPY else logprobs)
    hands = [by_hand(each, logp, loss) for each, logp in zip(given, logprobs, strict=True)]

    def objective(factors: Any) -> mx.array:
        parts = [
            (mx.array(slope, mx.float32) * plain(trainer, model, each, factors, scale)).sum()
            for each, (_, slope) in zip(given, hands, strict=True)
        ]
        return mx.stack(parts).sum()

    want = {name: np.array(leaf) for name, leaf in tree_flatten(mx.grad(objective)(params))}
    places = [scored_positions(each) for each in given]
    drawn = [datum_of(each, at) for each, at in zip(given, places, strict=True)]
    recorder = Recorder(policy)
    (added,) = finish(trainer, trainer.accumulate(recorder, drawn, resolved_loss(loss), TOTALS, returns_logprobs=True))
    finish(trainer, trainer.step(recorder, trainer.config.optimizer))
    assert_close(recorder.seen, want, 1e-4)
    for got, at, logp in zip(added.logprobs, places, logprobs, strict=True):
        np.testing.assert_allclose(got, logp[at], atol=1e-5)
    spread = [np.zeros(len(logp)) for logp in logprobs]
    for values, got, at in zip(spread, added.logprobs, places, strict=True):
        values[at] = got
    value = loss_value(given, spread, loss)
    assert value == pytest.approx(sum(hand for hand, _ in hands), rel=1e-4)
    if loss.name is not TokenLoss.CROSS_ENTROPY:  # which the trainer has the gradient of, and not the value
        assert added.metrics["loss"] == pytest.approx(value, rel=1e-4)


def test_places_that_change_no_gradient_are_left_out() -> None:
    each = TargetedTokens((1, 2, 3, 4), (0, 0, 4, 5), (0.0, 0.0, 0.0, 0.5), (0.0, 0.0, -1.0, -2.0))
    assert scored_positions(each) == [2, 3], "drawn without an advantage: its ratio is of interest"
    none = TargetedTokens((1, 2), (2, 3), (0.0, 0.0))
    assert scored_positions(none) == [0, 1], "a sample has at least one"
