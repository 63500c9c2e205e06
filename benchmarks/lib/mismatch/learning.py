"""Learning runs whose sampler and trainer differ, with and without weights that correct for it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import islice
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import numpy as np

from benchmarks.lib.mismatch.agreement import RANK
from benchmarks.lib.mismatch.bases import BFLOAT16, COARSE, FLOAT32, WIDENED, base
from benchmarks.lib.mismatch.pool_sampler import PoolSampler
from benchmarks.lib.training.in_process import Answer, InProcess
from benchmarks.lib.training.learning_tasks import Verdict
from mlx_parallm.config import Algorithm, LossConfig, ModelConfig, OldLogprobs, OptimizerConfig, RLTrainingConfig
from mlx_parallm.model.manager import SharedModelManager

PROMPTS, GROUP, TOKENS = 4, 8, 8
RATE, ENTROPY = 5e-4, 0.02
SLOTS = 2
KEPT = ("mismatch_kl", "kl_step", "step_scale", "entropy", "ratio_max", "clip_fraction", "grad_norm")
"""Metrics of an update that the record keeps."""


class Correction(StrEnum):
    """What an update does about tokens whose probability the trainer sees otherwise than the sampler did.

    NONE: nothing; it takes its own logprobs for those of the sampler. WEIGHTS: old_logprobs trainer, which weights a
    token by the quotient, at most 2. RATIO: old_logprobs sampler; the quotient is a part of the clipped policy ratio.
    """

    NONE = "not corrected"
    WEIGHTS = "weights"
    RATIO = "in the ratio"


@dataclass(frozen=True, slots=True)
class Arm:
    """How a run samples and trains. `products`: see `agreement.Pairing`. `old`: the version before samples."""

    name: str
    sampler: str = FLOAT32
    trainer: str = FLOAT32
    correction: Correction = Correction.RATIO
    products: mx.Dtype | None = None
    old: bool = False


ARMS = (
    Arm("float32"),
    Arm("bfloat16, weighted", BFLOAT16, BFLOAT16, Correction.WEIGHTS),
    Arm("bfloat16, not corrected", BFLOAT16, BFLOAT16, Correction.NONE),
    Arm("bfloat16, weighted, factors' products in float32", BFLOAT16, BFLOAT16, Correction.WEIGHTS, mx.float32),
    Arm("bfloat16 sampler, float32 trainer, weighted", BFLOAT16, WIDENED, Correction.WEIGHTS),
    Arm("6-bit sampler, not corrected", COARSE, FLOAT32, Correction.NONE),
    Arm("6-bit sampler, weighted", COARSE, FLOAT32, Correction.WEIGHTS),
    Arm("6-bit sampler, in the ratio", COARSE, FLOAT32, Correction.RATIO),
    Arm("a version old, not corrected", correction=Correction.NONE, old=True),
    Arm("a version old, in the ratio", old=True),
)


@dataclass(slots=True)
class LearningRun:
    """One run. `rewards`: the mean reward of the samples of each update, before it. `updates`: the metrics `KEPT` of
    each; empty where nothing could be learnt, as all rewards of each group were equal. `training_s`: seconds of each
    update without its samples."""

    arm: str
    seed: int
    rewards: list[float]
    updates: list[dict[str, float]]
    training_s: list[float]
    seconds: float

    @property
    def last(self) -> float:
        """Mean reward of the last three updates."""
        return float(np.mean(self.rewards[-3:]))


def learnt(arm: Arm, seed: int, updates: int) -> LearningRun:
    """Makes one run."""
    started = time.monotonic()
    trainer, sampler = _trainer(arm), _sampler(arm.sampler)
    trainer.restart(seed)
    task = Verdict()
    run = LearningRun(arm.name, seed, [], [], [], 0.0)
    prompts = task.training(seed)
    for number in range(updates):
        sampler.publish(1 + number % SLOTS, trainer.policy.weights())
        slot = 1 + (max(number - 1, 0) if arm.old else number) % SLOTS
        asked = list(islice(prompts, PROMPTS))
        texts = [prompt.text for prompt in asked]
        groups = sampler.sample(texts, GROUP, TOKENS, slot, seed * 1000 + number)
        rewards = [
            [task.rewarded(prompt, each.text, each.ended) for each in group]
            for prompt, group in zip(asked, groups, strict=True)
        ]
        run.rewards.append(float(np.mean(rewards)))
        seen, on_policy = [list(_seen(arm, group)) for group in groups], not (arm.old and number)
        training = time.monotonic()
        outcome = trainer.update(list(zip(seen, rewards, strict=True)), on_policy or arm.correction is Correction.NONE)
        run.training_s.append(time.monotonic() - training)
        metrics: dict[str, Any] = {} if outcome is None else outcome.metrics
        run.updates.append({name: float(metrics[name]) for name in KEPT if name in metrics})
    run.seconds = time.monotonic() - started
    return run


def _seen(arm: Arm, answers: list[Answer]) -> Iterator[Answer]:
    """The answers as training gets them: without logprobs, it takes its own for those of the sampler."""
    for each in answers:
        yield replace(each, logprobs=()) if arm.correction is Correction.NONE else each


def _trainer(arm: Arm) -> InProcess:
    old = OldLogprobs.TRAINER if arm.correction is Correction.WEIGHTS else OldLogprobs.SAMPLER
    config = RLTrainingConfig(
        algorithm=Algorithm.DAPO,
        update_frequency=PROMPTS * GROUP,
        gradient_checkpointing=False,
        loss=LossConfig(entropy_coef=ENTROPY, old_logprobs=old),
        optimizer=OptimizerConfig(learning_rate=RATE),
    )
    trainer = InProcess(config, ModelConfig(lora_rank=RANK), _base(arm.trainer))
    if arm.products is not None:
        trainer.trainer.model.dtype = arm.products
    return trainer


@cache
def _base(kind: str) -> SharedModelManager:
    manager = base(kind)
    manager.install_bank(SLOTS, RANK)
    return manager


@cache
def _sampler(kind: str) -> PoolSampler:
    manager = _base(kind)
    assert manager.bank is not None
    return PoolSampler(manager, manager.bank)


def forget_bases() -> None:
    """Frees the models."""
    _base.cache_clear()
    _sampler.cache_clear()
    gc.collect()
    mx.clear_cache()
