"""A tiny model ready to be trained, random samples, and the plainest forward to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from tiny import tiny_model

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.model.adapted import AdaptedLinear, adapter_layout, install_adapters
from mlx_parallm.model.attention import install_hook
from mlx_parallm.model.families import classify
from mlx_parallm.rl.policy import Policy
from mlx_parallm.rl.samples import Sample, UpdateBatch, UpdateOutcome
from mlx_parallm.rl.settings import LoRASettings, OptimizerSettings, TrainerSettings
from mlx_parallm.rl.trainable import Params, TrainableModel, TrainingContext
from mlx_parallm.rl.trainer import GRPOTrainer

LORA = LoRASettings(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"), seed=3)
SETTINGS = TrainerSettings(
    lora=LORA, optimizer=OptimizerSettings(learning_rate=1e-2), micro_batch_tokens=64, checkpoint_layers=False
)
VOCABULARY = 250


def make_trainer(settings: TrainerSettings = SETTINGS, family: str = "llama") -> tuple[GRPOTrainer, nn.Module]:
    """A trainer over the tiny model, whose linears read a bank of no adapters."""
    if family == "qwen3_moe":  # LoRA on experts is refused
        settings = replace(settings, lora=replace(settings.lora, targets=("q_proj", "v_proj", "o_proj")))
    model = tiny_model(family)
    linears = [(path, part.base) for path, part in model.named_modules() if isinstance(part, AdaptedLinear)]
    model.update_modules(tree_unflatten(linears))
    bank = AdapterBank(adapter_layout(model, classify(model)), 4, 8, mx.float32)
    install_adapters(model, bank)
    return GRPOTrainer(TrainableModel(model, bank, install_hook(model), settings.checkpoint_layers), settings), model


def make_policy(trainer: GRPOTrainer, moved: float = 0.0) -> Policy:
    """A fresh policy; `moved`: the size of random numbers put in place of b's zeros."""
    settings = trainer.settings
    policy = Policy(trainer.model.layout, settings.lora, settings.optimizer)
    if moved:
        random = np.random.default_rng(5)
        policy.params = {
            path: {"a": pair["a"], "b": mx.array(random.normal(size=pair["b"].shape, scale=moved), mx.float32)}
            for path, pair in policy.params.items()
        }
    return policy


def samples(count: int = 6, seed: int = 0, groups: int = 2) -> list[Sample]:
    """Groups of one prompt each; completions of unequal lengths, advantages of both signs."""
    random = np.random.default_rng(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(int(token) for token in random.integers(0, VOCABULARY, length))

    prompts = [ids(random.integers(3, 9)) for _ in range(groups)]
    made = [
        Sample(prompts[i % groups], ids(random.integers(1, 7)), (), 1.0, 1.0 - 2.0 * (i // groups % 2), i % groups)
        for i in range(count)
    ]
    return [replace(s, sampling_logprobs=(-3.0,) * len(s.completion_ids)) for s in made]


def plain_logprobs(trainer: GRPOTrainer, model: nn.Module, params: Params | None, sample: Sample) -> list[float]:
    """Of the completion's tokens, from the served model's own forward over one unpadded row and a full log-softmax."""
    bank = trainer.model.bank
    context = (
        None if params is None else TrainingContext(params, trainer.settings.lora.alpha / trainer.settings.lora.rank)
    )
    with bank.using(context):
        logits = model(mx.array([[*sample.prompt_ids, *sample.completion_ids]]))[0].astype(mx.float32)
    logits = logits / sample.temperature
    logprobs = logits - mx.logsumexp(logits, -1, keepdims=True)
    first = len(sample.prompt_ids) - 1
    return [float(logprobs[first + at, token].item()) for at, token in enumerate(sample.completion_ids)]


def with_logprobs(trainer: GRPOTrainer, model: nn.Module, policy: Policy, drawn: Sequence[Sample]) -> list[Sample]:
    """The samples as this policy would have drawn them."""
    return [replace(s, sampling_logprobs=tuple(plain_logprobs(trainer, model, policy.params, s))) for s in drawn]


def learn(trainer: GRPOTrainer, policy: Policy, drawn: Sequence[Sample]) -> UpdateOutcome:
    """One update, to its end."""
    told: list[UpdateOutcome | Exception] = []
    trainer.begin(policy, UpdateBatch(tuple(drawn)), told.append)
    while trainer.waits():
        trainer.advance()
    (outcome,) = told
    assert isinstance(outcome, UpdateOutcome), outcome
    return outcome
