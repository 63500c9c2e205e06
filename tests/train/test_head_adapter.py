"""Training of the output head's adapter: its gradients, alone, beside those of the layers, and of several policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from configs import changed
from mlx.utils import tree_flatten
from trainers import (
    LORA,
    Recorder,
    assert_close,
    finish,
    gradients,
    make_policy,
    make_trainer,
    plain_gradients,
    samples,
    unclipped,
)

from mlx_parallm.config import Algorithm, ModelConfig
from mlx_parallm.train.context import LoraSpan
from mlx_parallm.train.data import UpdateBatch
from mlx_parallm.train.forwards import head_blocks
from mlx_parallm.train.policy import Policy
from mlx_parallm.train.trainer import GRPOTrainer

WITH_HEAD = changed(LORA, lora_target_modules=("q_proj", "down_proj", "lm_head"))
HEAD_ONLY = changed(LORA, lora_target_modules=("lm_head",))
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "qwen3, tied": ("qwen3", {}),
    "gemma3, in a language part": ("gemma3", {}),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few samples make several blocks of the head, which begin and end within policies."""
    monkeypatch.setattr("mlx_parallm.train.forwards.HEAD_BLOCK", 5)


def trainer_of(name: str, lora: ModelConfig, **settings: Any) -> tuple[GRPOTrainer, Any]:
    family, config = MODELS[name]
    made = unclipped(**settings)
    made = changed(made, loss=changed(made.loss, algorithm=Algorithm.CROSS_ENTROPY))
    return make_trainer(made, family, lora, **config)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("lora", [WITH_HEAD, HEAD_ONLY], ids=["layers and head", "head"])
def test_gradients_equal_those_of_a_full_log_softmax(name: str, checkpointed: bool, lora: ModelConfig) -> None:
    """−Σ logπ / ΣT of plain forwards of the served model, differentiated by MLX itself through every logit."""
    trainer, model = trainer_of(name, lora, gradient_checkpointing=checkpointed)
    policy, drawn = make_policy(trainer, moved=0.05), samples(4)
    want = plain_gradients(trainer, model, policy, drawn)
    assert sum("lm_head" in leaf for leaf in want) == 2
    assert_close(gradients(trainer, policy, drawn), want, 1e-5)


# ---- the fused function ----------------------------------------------------------------------------


def factors(random: np.random.Generator, rank: int, width: int, vocabulary: int) -> dict[str, mx.array]:
    a, b = random.normal(size=(width, rank)), random.normal(size=(rank, vocabulary))
    return {"a": mx.array(a, mx.float32), "b": mx.array(b, mx.float32)}


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_blocks_of_several_policies_have_the_gradients_of_the_plain_formula(entropy_gradient: bool) -> None:
    """Policies with factors of unlike ranks, and one without; blocks of 5 positions lie across them."""
    random, width, vocabulary, counts = np.random.default_rng(0), 6, 11, (7, 4, 1, 6)
    weight = mx.array(random.normal(size=(width, vocabulary)), mx.float32)
    params = [{"lm_head": factors(random, rank, width, vocabulary)} if rank else {} for rank in (2, 0, 1, 3)]
    total = sum(counts)
    hidden = mx.array(random.normal(size=(total, width)), mx.float32)
    targets = mx.array(random.integers(0, vocabulary, total))
    temperatures = mx.array(random.uniform(0.5, 2.0, total), mx.float32)
    upstream, upstream_entropy = (mx.array(random.normal(size=total), mx.float32) for _ in range(2))

    def head(states, spans):
        parts, start = [], 0
        for span in spans:
            part = states[start : start + span.tokens]
            pair = span.params.get("lm_head")
            change = 0.0 if pair is None else span.scale * (part @ pair["a"]) @ pair["b"]
            parts.append(part @ weight + change)
            start += span.tokens
        assert start == states.shape[0]
        return mx.concatenate(parts)

    def spans_of(params):
        return [LoraSpan(count, each, 1.0 + at) for at, (count, each) in enumerate(zip(counts, params, strict=True))]

    def plain(states, params):
        logits = head(states, spans_of(params)) / temperatures[:, None]
        logp = logits - mx.logsumexp(logits, -1, keepdims=True)
        entropies = -(mx.exp(logp) * logp).sum(-1)
        return logp[mx.arange(total), targets], entropies

    def fused(states, params):
        return head_blocks(head, states, targets, temperatures, spans_of(params), entropy_gradient).joined()

    def objective(scores: Callable[..., tuple[mx.array, mx.array]]):
        def value(states, params):
            logp, entropies = scores(states, params)
            return (upstream * logp).sum() + ((upstream_entropy * entropies).sum() if entropy_gradient else 0.0)

        return value

    for got, want in zip(fused(hidden, params), plain(hidden, params), strict=True):
        assert mx.allclose(got, want, atol=1e-5)
    got, want = (
        {name: np.array(leaf) for name, leaf in tree_flatten(list(mx.grad(objective(each), [0, 1])(hidden, params)))}
        for each in (fused, plain)
    )
    assert_close(got, want, 1e-5)


# ---- several policies --------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["llama", "tied llama"])
def test_policies_with_and_without_a_head_learn_together_as_if_alone(name: str, checkpointed: bool) -> None:
    trainer, _ = trainer_of(name, WITH_HEAD, gradient_checkpointing=checkpointed, micro_batch_tokens=200)
    policies = [
        moved(trainer.open(str(at), lora=lora), at) for at, lora in enumerate((WITH_HEAD, LORA, HEAD_ONLY, WITH_HEAD))
    ]
    drawn = [samples(5, seed) for seed in range(4)]
    want = [gradients(trainer, policy, each) for policy, each in zip(policies, drawn, strict=True)]
    recorders = [Recorder(policy) for policy in policies]
    for recorder, each in zip(recorders, drawn, strict=True):
        trainer.begin(recorder, UpdateBatch(tuple(each)))
    finish(trainer)
    for recorder, each in zip(recorders, want, strict=True):
        assert_close(recorder.seen, each, 1e-5)


def moved(policy: Policy, seed: int) -> Policy:
    """The policy with random numbers in place of b's zeros."""
    random = np.random.default_rng(seed)
    for pair in policy.params.values():
        pair["b"] = mx.array(random.normal(size=pair["b"].shape, scale=0.05), mx.float32)
    return policy
