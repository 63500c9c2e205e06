"""How far the log-probabilities of a sampler and of a trainer are apart, token by token, and their gradients."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import numpy as np
from mlx.utils import tree_flatten

from benchmarks.lib.mismatch.bases import BFLOAT16, COARSE, FLOAT32, FOUR_BITS, FOUR_BITS_BF16, WIDENED, base
from benchmarks.lib.mismatch.pool_sampler import PoolSampler
from benchmarks.lib.training.in_process import Answer, InProcess
from benchmarks.lib.training.learning_tasks import Verdict, chat
from mlx_parallm.config import ModelConfig, OptimizerConfig, RLTrainingConfig
from mlx_parallm.train.context import Params
from mlx_parallm.train.data import Datum, UpdateBatch, answered
from mlx_parallm.train.policy import Policy, PolicyState
from mlx_parallm.train.trainer import GRPOTrainer

RANK = 16
PROMPTS, GROUP, TOKENS = 4, 6, 12
SIZE = 5e-3
"""Standard deviation of the factors b of the adapter: that of some updates of the default learning rate."""
LEAST, MOST = 0.8, 1.25
"""Ratios outside of these count as far off; `clip_low` and `clip_high` are about these."""
DEPTHS = (0.0, 1e-3, 1e-2, 0.1, 0.5, 0.9, 1.0)

Gradients = Mapping[str, mx.array]


@dataclass(frozen=True, slots=True)
class Pairing:
    """A sampler and a trainer. `products`: of the factors in training; None: as the trainer has them. `long`: prompts
    of more than two blocks of the KV pool, which quantizes full blocks only."""

    name: str
    sampler: str
    trainer: str
    products: mx.Dtype | None = None
    kv_bits: int | None = None
    long: bool = False


PAIRINGS = (
    Pairing("float32", FLOAT32, FLOAT32),
    Pairing("bfloat16", BFLOAT16, BFLOAT16),
    Pairing("bfloat16, factors' products in float32", BFLOAT16, BFLOAT16, mx.float32),
    Pairing("bfloat16 sampler, float32 trainer", BFLOAT16, WIDENED),
    Pairing("4-bit, float32 activations", FOUR_BITS, FOUR_BITS),
    Pairing("4-bit, bfloat16 activations", FOUR_BITS_BF16, FOUR_BITS_BF16),
    Pairing("float32, 8-bit KV", FLOAT32, FLOAT32, kv_bits=8, long=True),
    Pairing("float32, 4-bit KV", FLOAT32, FLOAT32, kv_bits=4, long=True),
    Pairing("6-bit sampler, float32 trainer", COARSE, FLOAT32),
)


@dataclass(slots=True)
class Agreement:
    """One pairing. Differences are of log-probabilities, in nats, the trainer's minus the sampler's.

    kl: mean of r - log r - 1, with the ratio r of the two probabilities. outside: share of the tokens whose ratio is
    outside of `LEAST` and `MOST`. depths: the same of the tokens by the sampler's probability.
    gradient_error: norm of the difference of the gradient from that of the same weights in float32, relative to its
    norm; None if it was not measured.
    """

    name: str
    tokens: int
    mean: float
    median: float
    percent99: float
    most: float
    kl: float
    outside: float
    depths: list[dict[str, float]]
    sampling_s: float
    scoring_s: float
    gradient_error: float | None = None


def measured(pairing: Pairing) -> Agreement:
    """Samples by an adapter with random factors, and scores the samples."""
    sampling = base(pairing.sampler)
    sampler = PoolSampler(sampling, sampling.install_bank(1, RANK), pairing.kv_bits)
    training = sampling if pairing.trainer == pairing.sampler else base(pairing.trainer)
    lora = ModelConfig(lora_rank=RANK)
    config = RLTrainingConfig(optimizer=OptimizerConfig(max_grad_norm=1e30), gradient_checkpointing=False)
    trainer = InProcess(config, lora, training)
    if pairing.products is not None:
        trainer.trainer.model.dtype = pairing.products
    factors = moved(trainer.policy.params)
    trainer.policy.restore(replace(trainer.policy.state, params=factors))
    sampler.publish(1, trainer.policy.weights())
    started = time.monotonic()
    answers = [each for group in sampler.sample(_prompts(pairing), GROUP, TOKENS, 1, seed=0) for each in group]
    sampled = time.monotonic()
    scores = trainer.logprobs(answers)
    found = _agreement(pairing.name, answers, scores, sampled - started, time.monotonic() - sampled)
    if BFLOAT16 in (pairing.sampler, pairing.trainer):
        found.gradient_error = _gradient_error(trainer, answers, factors)
    del sampler, sampling, training, trainer
    gc.collect()
    mx.clear_cache()
    return found


def _prompts(pairing: Pairing) -> list[str]:
    tasks = list(islice(Verdict().training(0), PROMPTS))
    if not pairing.long:
        return [task.text for task in tasks]
    sentences = " ".join(task.text.split("user\n")[1].split("?")[0] + "?" for task in islice(Verdict().training(1), 20))
    return [chat(f"{sentences} Now only the last: {task.text.split('user')[1].split('<')[0]}") for task in tasks]


def moved(fresh: Params, size: float = SIZE) -> Params:
    """The factors with random b."""
    keys = iter(mx.random.split(mx.random.key(0), len(fresh)))
    made = {
        path: {"a": pair["a"], "b": size * mx.random.normal(pair["b"].shape, key=next(keys))}
        for path, pair in fresh.items()
    }
    mx.eval(made)
    return made


def _agreement(
    name: str, answers: Sequence[Answer], scores: Iterable[Sequence[float]], sampling_s: float, scoring_s: float
) -> Agreement:
    of_sampler = np.concatenate([each.logprobs for each in answers])
    apart = np.concatenate([np.array(each) for each in scores]) - of_sampler
    size, far = np.abs(apart), (np.exp(apart) < LEAST) | (np.exp(apart) > MOST)
    depths = []
    for low, high in pairwise(DEPTHS):
        inside = (np.exp(of_sampler) >= low) & (np.exp(of_sampler) < high + (high == 1))
        if count := int(inside.sum()):
            part = {"tokens": count, "mean": float(size[inside].mean()), "outside": float(far[inside].mean())}
            depths.append({"from": low, "to": high, **part})
    percent99 = float(np.percentile(size, 99))
    kl, outside = float(np.mean(np.expm1(apart) - apart)), float(far.mean())
    summary = len(apart), float(size.mean()), float(np.median(size)), percent99, float(size.max()), kl, outside
    return Agreement(name, *summary, depths, sampling_s, scoring_s)


# -- gradients -----------------------------------------------------------------------------------


def _gradient_error(trainer: InProcess, answers: Sequence[Answer], factors: Params) -> float:
    exact = InProcess(trainer.training, ModelConfig(lora_rank=RANK), base(WIDENED))
    exact.policy.restore(replace(exact.policy.state, params=factors))
    rng = random.Random(0)
    data = [answered(each.prompt, each.tokens, advantage=rng.gauss(0, 1)) for each in answers]
    return error(gradients(trainer.trainer, trainer.policy, data), gradients(exact.trainer, exact.policy, data))


def gradients(trainer: GRPOTrainer, policy: Policy, data: Sequence[Datum]) -> Gradients:
    """Those of an update of these data. The policy stays as it is."""
    found: dict[str, mx.array] = {}
    before, stepped = policy.state, policy.stepped

    def watched(gradients: Params, settings: OptimizerConfig, scale: float = 1.0) -> PolicyState:
        found.update(tree_flatten(gradients))
        return stepped(gradients, settings, scale)

    policy.stepped = watched  # type: ignore[method-assign]
    done = trainer.begin(policy, UpdateBatch(tuple(data)))
    while trainer.waits():
        trainer.advance()
    done.result()
    policy.stepped = stepped  # type: ignore[method-assign]
    policy.restore(before)
    return found


def error(got: Gradients, exact: Gradients) -> float:
    """Norm of the difference divided by the norm, over all arrays together."""
    apart = sum(float((got[name] - exact[name]).square().sum()) for name in exact)
    return float((apart / sum(float(each.square().sum()) for each in exact.values())) ** 0.5)
