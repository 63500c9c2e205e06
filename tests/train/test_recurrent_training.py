"""Training models with recurrent layers: what samples share is computed once, and the state is carried on."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from configs import loss_config
from family_checks import Served
from tiny import RECURRENT
from trainers import (
    assert_close,
    gradients,
    gradients_of,
    lazy_logprobs,
    learn,
    logprobs,
    lora_of,
    make_policy,
    make_trainer,
    packed,
    samples,
    unclipped,
    with_logprobs,
)

from mlx_parallm.config import Algorithm
from mlx_parallm.train.branches import Branch
from mlx_parallm.train.context import LoraSpan, Params
from mlx_parallm.train.data import Datum, answered
from mlx_parallm.train.model import TrainableModel
from mlx_parallm.train.policy import Policy
from mlx_parallm.train.trainer import GRPOTrainer

SHARED = (7, 7, 9, 1, 30, 31, 32, 33, 34, 35)


def branching() -> list[Datum]:
    """Two groups, the answers of one of which begin alike too, so that there is a branch in a branch."""
    prompt, beginning = SHARED, (40, 41, 42, 43, 44)
    answers = [(*beginning, 5), (*beginning, 6, 6, 6), (8, 9), (10,)]
    logprobs = [(-3.0,) * len(answer) for answer in answers]
    drawn = [
        answered(prompt, answer, known, 1.0, 1.0 - 0.7 * number, group=9)
        for number, (answer, known) in enumerate(zip(answers, logprobs, strict=True))
    ]
    return [*samples(4), *drawn]


def trainer_for(family: str, checkpointed: bool = False) -> tuple[GRPOTrainer, nn.Module]:
    settings = unclipped(
        gradient_checkpointing=checkpointed,
        micro_batch_tokens=1000,
        loss=loss_config(algorithm=Algorithm.GRPO, kl_coef=0.0),
    )
    return make_trainer(settings, family, lora_of(family))


def plain_grpo(model: nn.Module, trainer: GRPOTrainer, policy: Policy, drawn: Sequence[Datum]) -> dict[str, np.ndarray]:
    """The gradient of −Σ A logπ / (N T), by mlx-lm's model on each sequence alone. The policy has drawn the samples, so
    its ratios are 1 and nothing is clipped."""

    def objective(params: Params) -> mx.array:
        value = mx.array(0.0)
        for sample in drawn:
            advantages = mx.array([sample.advantages[place] for place in sample.trained()])
            logp = lazy_logprobs(trainer, model, params, sample)
            value = value - (advantages * logp).mean() / len(drawn)
        return value

    return gradients_of(objective, policy)


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_grpo_update_has_the_gradients_of_plain_forwards(family: str, checkpointed: bool) -> None:
    trainer, model = trainer_for(family, checkpointed)
    policy = make_policy(trainer, moved=0.05)
    drawn = with_logprobs(trainer, model, policy, branching())
    assert packed(drawn).branch.branches, "there is something to carry the state into"
    want = plain_grpo(model, trainer, policy, drawn)
    assert_close(gradients(trainer, policy, drawn), want, 1e-5)
    assert all(np.abs(leaf).max() > 0 for name, leaf in want.items() if name.endswith(".b"))


class Norm(nn.Module):
    """A norm that keeps whether it ran in training mode."""

    def __init__(self, norm: nn.Module, modes: list[bool]) -> None:
        super().__init__()
        self._norm, self._modes = norm, modes

    def __call__(self, x: mx.array) -> mx.array:
        self._modes.append(self.training)
        return self._norm(x)


def test_what_comes_after_the_layers_is_in_training_mode_too_and_only_in_training() -> None:
    """Kimi K3 has a kernel without a gradient there."""
    served, modes = Served("qwen3_5"), list[bool]()
    text = served.model.language_model.model
    text.norm = Norm(text.norm, modes).eval()
    model = TrainableModel(served.model, served.bank, served.plan, lambda *_: False)
    model.trunk(mx.array([1, 2, 3]), [Branch(0, 3, ())], None)
    assert modes == [True]
    assert not text.norm.training


@pytest.mark.parametrize("family", RECURRENT)
def test_policies_that_are_trained_together_keep_their_own_factors(family: str) -> None:
    trainer, _ = trainer_for(family)
    policies = [make_policy(trainer, moved=0.1, name=name, seed=seed) for seed, name in enumerate("ab")]
    batches = [packed(samples(3, seed=1)), packed(samples(5, seed=2))]
    spans = [LoraSpan(b.tokens.size, p.params, p.scale) for b, p in zip(batches, policies, strict=True)]
    together = trainer._forwards.scores(batches, spans).scores
    for (got, _), batch, policy in zip(together, batches, policies, strict=True):
        assert mx.allclose(got, logprobs(trainer, batch, policy.params, policy.scale), atol=1e-4)


@pytest.mark.parametrize("family", RECURRENT)
def test_an_update_moves_the_policy_towards_what_was_better(family: str) -> None:
    trainer, model = trainer_for(family)
    policy = make_policy(trainer, moved=0.05)
    drawn = with_logprobs(trainer, model, policy, branching())

    def favoured() -> float:
        batch = packed(drawn)
        logp = batch.padded(logprobs(trainer, batch, policy.params, policy.scale))
        return sum(
            sample.advantages[at] * float(logp[row, place].item())
            for row, sample in enumerate(drawn)
            for place, at in enumerate(sample.trained())
        )

    before = favoured()
    learn(trainer, policy, drawn)
    assert favoured() > before
