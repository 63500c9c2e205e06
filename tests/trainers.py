"""A tiny model ready to be trained, random samples, and the plainest forward to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from configs import TRAINING, changed
from lora import remove_adapters
from mlx.utils import tree_flatten
from sample_parts import with_logprobs_of
from tiny import tiny_model

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.weights import lora_scale
from mlx_parallm.config import Algorithm, ModelConfig, ResolvedTraining
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters
from mlx_parallm.train.branches import Branch, Bucket
from mlx_parallm.train.context import LoraSpan, Params, TrainingContext
from mlx_parallm.train.data import Datum, UpdateBatch, UpdateOutcome, answered
from mlx_parallm.train.model import TrainableModel
from mlx_parallm.train.packing import MicroBatch, SampleBatch, pack
from mlx_parallm.train.policy import Policy, PolicySnapshot
from mlx_parallm.train.trainer import GRPOTrainer

LORA = ModelConfig(lora_rank=4, lora_alpha=8.0, lora_target_modules=("q_proj", "v_proj", "o_proj", "down_proj"))
MIXER_TARGETS = {
    "lfm2": ("in_proj", "out_proj", "q_proj", "w2"),
    "mamba": ("in_proj", "x_proj", "dt_proj", "out_proj"),
    "mamba2": ("in_proj", "out_proj"),
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "down_proj"),
}
SETTINGS = changed(
    TRAINING, learning_rate=1e-2, max_kl_step=None, micro_batch_tokens=64, gradient_checkpointing=False, seed=3
)
VOCABULARY = 250
SINGLE = [each for each in Algorithm if each not in (Algorithm.DPO, Algorithm.KTO, Algorithm.DISTILLATION)]
"""Losses of one sequence at a time, without a teacher or an estimate over all samples."""


def lora_of(family: str) -> ModelConfig:
    """`LORA`, with the linears of mixers for a family that has them."""
    return changed(LORA, lora_target_modules=MIXER_TARGETS.get(family, LORA.lora_target_modules))


def make_trainer(
    settings: ResolvedTraining = SETTINGS,
    family: str = "llama",
    lora: ModelConfig = LORA,
    measure_kl: bool = True,
    **config: Any,
) -> tuple[GRPOTrainer, nn.Module]:
    """A trainer over the tiny model, whose linears read a bank of no adapters; `config` as in `tiny_model`."""
    return trainer_of(tiny_model(family, **config), settings, lora, measure_kl)


def trainer_of(
    model: nn.Module,
    settings: ResolvedTraining = SETTINGS,
    lora: ModelConfig = LORA,
    measure_kl: bool = True,
    compatible: bool = False,
    dtype: mx.Dtype = mx.float32,
) -> tuple[GRPOTrainer, nn.Module]:
    """The same over another model, which is changed. `dtype`: of its activations."""
    remove_adapters(model)
    bank = AdapterBank(adapter_layout(model), 4, 8, dtype)
    install_adapters(model, bank)
    trainable = TrainableModel(
        model, bank, prepare(model, compatible), lambda *_: bool(settings.gradient_checkpointing)
    )
    return GRPOTrainer(trainable, settings, lora, measure_kl), model


def make_policy(trainer: GRPOTrainer, moved: float = 0.0, name: str = "default", seed: int = 5) -> Policy:
    """A fresh policy; `moved`: the size of random numbers put in place of b's zeros."""
    policy = trainer.open(name)
    if moved:
        random = np.random.default_rng(seed)
        params = {
            path: {"a": pair["a"], "b": mx.array(random.normal(size=pair["b"].shape, scale=moved), mx.float32)}
            for path, pair in policy.params.items()
        }
        policy.restore(replace(policy.state, params=params))
    return policy


def samples(count: int = 6, seed: int = 0, groups: int = 2) -> list[Datum]:
    """Groups of one prompt each; completions of unequal lengths, advantages of both signs."""
    random = np.random.default_rng(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(int(token) for token in random.integers(0, VOCABULARY, length))

    prompts = [ids(random.integers(3, 9)) for _ in range(groups)]
    completions = [ids(random.integers(1, 7)) for _ in range(count)]
    return [
        answered(prompts[i % groups], drawn, (-3.0,) * len(drawn), 1.0, 1.0 - 2.0 * (i // groups % 2), i % groups)
        for i, drawn in enumerate(completions)
    ]


def packed(drawn: Sequence[Datum]) -> MicroBatch:
    """These samples as one micro-batch, in this order."""
    return pack(SampleBatch.of(drawn))


def all_buckets(branch: Branch) -> list[Bucket]:
    """The buckets of a branch, and of those in it."""
    return [*branch.buckets, *(bucket for inner in branch.branches for bucket in all_buckets(inner))]


def logprobs(trainer: GRPOTrainer, batch: MicroBatch, params: Params | None, scale: float) -> mx.array:
    """Of the trained tokens, [N], with these factors; None: of the base model."""
    spans = None if params is None else [LoraSpan(batch.tokens.size, params, scale)]
    ((logp, _),) = trainer._forwards.scores([batch], spans).scores
    return logp


def everywhere(params: Params, scale: float) -> TrainingContext:
    """Every token of any forward uses these factors."""
    return TrainingContext((LoraSpan(0, params, scale),))


def plain_logprobs(trainer: GRPOTrainer, model: nn.Module, params: Params | None, sample: Datum) -> list[float]:
    """Of the trained tokens, from the served model's own forward over one unpadded row and a full log-softmax."""
    return [float(value) for value in np.array(lazy_logprobs(trainer, model, params, sample))]


def lazy_logprobs(trainer: GRPOTrainer, model: nn.Module, params: Params | None, sample: Datum) -> mx.array:
    """The same as an array [n] that MLX can differentiate."""
    lora, at = trainer.lora, sample.trained()
    scale = lora_scale(lora.lora_alpha, lora.lora_rank, lora.lora_rslora)
    with trainer.model.bank.using(None if params is None else everywhere(params, scale)):
        logits = model(mx.array([sample.token_ids]))[0, :-1].astype(mx.float32)
    logits = logits / mx.array(sample.temperatures()[1:])[:, None]
    logprobs = logits - mx.logsumexp(logits, -1, keepdims=True)
    return logprobs[mx.array(at) - 1, mx.array([sample.token_ids[place] for place in at])]


def with_logprobs(trainer: GRPOTrainer, model: nn.Module, policy: Policy, drawn: Sequence[Datum]) -> list[Datum]:
    """The samples as this policy would have drawn them."""
    return [with_logprobs_of(s, plain_logprobs(trainer, model, policy.params, s)) for s in drawn]


def learning(
    drawn: Sequence[Datum], settings: ResolvedTraining = SETTINGS, *family: str, moved: float = 0.05, **options: Any
) -> tuple[GRPOTrainer, nn.Module, Policy, list[Datum]]:
    """A trainer, its model, a policy, and these samples as the policy would have drawn them. See `make_trainer`."""
    trainer, model = make_trainer(settings, *family, **options)
    policy = make_policy(trainer, moved)
    return trainer, model, policy, with_logprobs(trainer, model, policy, drawn)


def assert_plain_logprobs(trainer: GRPOTrainer, model: nn.Module, policy: Policy, drawn: Sequence[Datum]) -> MicroBatch:
    """The samples as one micro-batch, whose logprobs are those of plain forwards over one sample after the other."""
    batch = packed(drawn)
    got = batch.padded(logprobs(trainer, batch, policy.params, policy.scale))
    for row, sample in enumerate(drawn):
        want = plain_logprobs(trainer, model, policy.params, sample)
        assert got[row, : len(want)].tolist() == pytest.approx(want, abs=1e-4)
    return batch


def learn(trainer: GRPOTrainer, policy: Policy, drawn: Sequence[Datum]) -> UpdateOutcome:
    """One update, to its end."""
    return finish(trainer, trainer.begin(policy, UpdateBatch(tuple(drawn))))[0]


def snapshot(policy: Policy) -> PolicySnapshot:
    """A copy of the policy as it is, made in many turns."""
    *turns, copy = policy.state.copied(100)
    assert len(turns) > 1
    assert set(turns) == {None}
    return copy


def leaves(policy: Policy) -> dict[str, np.ndarray]:
    return {name: np.array(leaf) for name, leaf in tree_flatten(policy.params)}


def plain_gradients(
    trainer: GRPOTrainer, model: nn.Module, policy: Policy, drawn: Sequence[Datum]
) -> dict[str, np.ndarray]:
    """Of −Σ logπ / ΣT, by plain forwards of the served model that MLX differentiates through every logit."""
    total = sum(len(sample.trained()) for sample in drawn)

    def plain(params: Params) -> mx.array:
        value = mx.array(0.0)
        for sample in drawn:
            value = value - lazy_logprobs(trainer, model, params, sample).sum() / total
        return value

    return gradients_of(plain, policy)


def gradients_of(objective: Callable[[Params], mx.array], policy: Policy) -> dict[str, np.ndarray]:
    """By MLX, at the policy's parameters."""
    return {name: np.array(leaf) for name, leaf in tree_flatten(mx.grad(objective)(policy.params))}


def gradients(trainer: GRPOTrainer, policy: Policy, drawn: Sequence[Datum]) -> dict[str, np.ndarray]:
    """Of one update over `drawn`, before clipping."""
    update = Recorder(policy)
    learn(trainer, update, drawn)
    return update.seen


class Recorder:
    """A policy that keeps the gradients instead of applying them."""

    def __init__(self, policy: Policy) -> None:
        self.params, self.scale, self.state = policy.params, policy.scale, policy.state
        self.nbytes, self.parameters = policy.nbytes, policy.parameters
        self.seen: dict[str, np.ndarray] = {}

    def stepped(self, gradients, settings, scale=1.0):
        self.seen = {name: np.array(leaf) for name, leaf in tree_flatten(gradients)}
        return self.state

    def restore(self, goal) -> None:
        pass


def unclipped(settings=SETTINGS, **fields):
    return changed(settings, max_grad_norm=1e9, **fields)


def assert_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray], relative: float) -> None:
    """Each tensor differs by at most `relative` of the largest gradient there is."""
    assert got.keys() == want.keys()
    largest = max(np.abs(leaf).max() for leaf in want.values())
    assert largest > 0
    for name, leaf in want.items():
        np.testing.assert_allclose(got[name], leaf, rtol=0, atol=relative * largest, err_msg=name)


def finish(trainer: GRPOTrainer, *futures: Future[Any]) -> list[Any]:
    """Runs all units that wait. Returns the results of these futures, or raises the error of one."""
    while trainer.waits():
        trainer.advance()
    return [future.result(timeout=0) for future in futures]


def failing(trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch, owner: object, method: str) -> None:
    """The next call raises what a device would."""
    inner: Callable[..., object] = getattr(owner, method)

    def once(*args: object, **kwargs: object) -> object:
        monkeypatch.setattr(owner, method, inner)
        raise RuntimeError("injected")

    monkeypatch.setattr(owner, method, once)


def fall(trainer: GRPOTrainer) -> None:
    """Units up to one that fails, as the engine takes it."""
    with pytest.raises(RuntimeError, match="injected"):
        finish(trainer)
    trainer.reset()
