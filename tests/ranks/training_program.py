"""A program that ranks run together: `mlx.launch -n 2 -- python training_program.py FAMILY`. Rank 0 trains the tiny
model split among them and the whole one, and prints how far they are apart, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from configs import changed, loss_config
from tiny import tiny_model
from trainers import LORA, SETTINGS, VOCABULARY, gradients, learn, leaves, make_policy, samples, trainer_of

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.config import OptimizerConfig, ResolvedTraining
from mlx_parallm.extras.ranks.follower import Follower
from mlx_parallm.extras.ranks.joining import Ranks, join
from mlx_parallm.extras.ranks.leader import Leader
from mlx_parallm.extras.ranks.parts import FollowingParts, LeadingParts
from mlx_parallm.extras.ranks.tensor_parallel import split_model
from mlx_parallm.extras.ranks.training import FollowingTraining, LeadingTrainableModel
from mlx_parallm.extras.reward_models.fitting import RewardModelInTraining
from mlx_parallm.extras.reward_models.model import RewardModel
from mlx_parallm.extras.reward_models.preferences import Preference
from mlx_parallm.extras.reward_models.work import scored, stepped
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters
from mlx_parallm.train.data import UpdateBatch
from mlx_parallm.train.policy import Policy
from mlx_parallm.train.trainer import GRPOTrainer

HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LOSS = loss_config(kl_coef=0.1)
QUANTIZED = "quantized"
CLIPPED, LEARNING_RATE = 0.05, 3e-3


def model_of(family: str) -> nn.Module:
    """The tiny model of a family, or a llama with quantized weights."""
    if family != QUANTIZED:
        return tiny_model(family, **HEADS)
    model = tiny_model("llama", intermediate_size=128)
    nn.quantize(model, group_size=32, bits=4)
    return model


def settings(**fields: Any) -> ResolvedTraining:
    return changed(SETTINGS, loss=LOSS, **fields)


def split_trainer(family: str, ranks: Ranks, leader: Leader, wanted: ResolvedTraining, lora: Any) -> GRPOTrainer:
    model = model_of(family)
    layout = adapter_layout(model)
    split = split_model(model, ranks.group)
    bank = AdapterBank(layout, 4, 8, mx.float32, make_group=LeadingParts(ranks.group, leader).linear_group(split))
    install_adapters(model, bank)
    recomputed = bool(wanted.gradient_checkpointing)
    trainable = LeadingTrainableModel(model, bank, prepare(model), lambda *_: recomputed, split, leader)
    return GRPOTrainer(trainable, wanted, lora)


def apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The largest difference, relative to the largest value."""
    largest = max(float(np.abs(leaf).max()) for leaf in other.values())
    return max(float(np.abs(one[name] - leaf).max()) for name, leaf in other.items()) / largest


def lead(family: str, ranks: Ranks) -> dict[str, float]:
    leader, found = Leader(ranks.peers), {}
    for name, recomputed, targets in (
        ("kept", False, TARGETS),
        ("recomputed", True, TARGETS),
        ("with_head", True, (*TARGETS[:4], "lm_head")),
        ("head_only", False, ("lm_head",)),
    ):
        lora = changed(LORA, lora_target_modules=targets)
        wanted = settings(gradient_checkpointing=recomputed)
        split = split_trainer(family, ranks, leader, wanted, lora)
        whole, _ = trainer_of(model_of(family), wanted, lora)
        both = [gradients(each, make_policy(each, moved=0.05), samples(8)) for each in (split, whole)]
        found[f"gradients_{name}"] = apart(*both)
    lora = changed(LORA, lora_target_modules=TARGETS)
    wanted = settings(gradient_checkpointing=True, max_grad_norm=CLIPPED, learning_rate=LEARNING_RATE)
    trainers = [split_trainer(family, ranks, leader, wanted, lora), trainer_of(model_of(family), wanted, lora)[0]]
    found |= _updates(trainers)
    found["rewards"] = apart(*map(_rewards, trainers))
    leader.stop()
    return found


def _updates(trainers: list[GRPOTrainer]) -> dict[str, float]:
    """Three clipped updates of two policies that share micro-steps, after one that was abandoned halfway."""
    before, scored, norms, factors = [], [], [], []
    for trainer in trainers:
        policy, other = make_policy(trainer, moved=0.05), make_policy(trainer, moved=0.1, name="other")
        before += _logprobs(trainer, [policy, other])
        trainer.pace(1e-9)  # a unit is one stage
        trainer.begin(policy, UpdateBatch(tuple(samples(8))))
        for _ in range(5):
            trainer.advance()
        trainer.abandon(policy)
        for seed in range(3):
            trainer.begin(other, UpdateBatch(tuple(samples(4, seed=7 + seed))))
            norms.append(learn(trainer, policy, samples(8, seed=seed)).metrics["grad_norm"])
        factors.append(leaves(policy) | {f"other.{name}": leaf for name, leaf in leaves(other).items()})
        scored.append(_logprobs(trainer, [policy, other, None]))
    split, whole = scored
    return {
        "learnt": max(abs(one - other) for one, other in zip(before, split, strict=False)),
        "updates": apart(*factors),
        "logprobs": max(abs(one - other) for one, other in zip(split, whole, strict=True)),
        "smallest_norm": min(norms),
        "max_grad_norm": CLIPPED,
    }


def _rewards(trainer: GRPOTrainer) -> dict[str, np.ndarray]:
    """What a reward model says after two steps."""
    random = np.random.default_rng(1)
    rows = [tuple(int(token) for token in random.integers(0, VOCABULARY, 9)) for _ in range(8)]
    pairs = [Preference(one[:4], one[4:], other[4:]) for one, other in zip(rows[::2], rows[1::2], strict=True)]
    model = RewardModel.new(trainer.model.layout, LORA, 0)
    training = RewardModelInTraining(model, OptimizerConfig(learning_rate=0.01))
    asked: list[Any] = [trainer.run(stepped(trainer, training, pairs)) for _ in range(2)]
    while trainer.waits():
        trainer.advance()
    asked.append(trainer.run(scored(trainer, training.model, rows)))
    while trainer.waits():
        trainer.advance()
    assert all(step.result(0).loss < 1 for step in asked[:2])
    return {"rewards": np.array(asked[2].result(0))}


def _logprobs(trainer: GRPOTrainer, policies: Sequence[Policy | None]) -> list[float]:
    asked = [trainer.logprobs(each, samples(8, seed=9)) for each in policies]
    while trainer.waits():
        trainer.advance()
    return [value for each in asked for row in each.result(0) for value in row]


def follow(family: str, ranks: Ranks) -> None:
    model = model_of(family)
    layout = adapter_layout(model)
    split = split_model(model, ranks.group)
    bank = AdapterBank(layout, 4, 8, mx.float32, make_group=FollowingParts(ranks.group).linear_group(split))
    install_adapters(model, bank)
    training = FollowingTraining(model, bank, prepare(model), split)
    Follower(cast(BatchRunner, None), bank, training).follow(ranks.peers[0].work)


if __name__ == "__main__":
    joined = join()
    assert joined is not None
    if joined.leads:
        print(json.dumps(lead(sys.argv[1], joined)), flush=True)
    else:
        follow(sys.argv[1], joined)
