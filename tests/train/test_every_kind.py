"""The trainer learns with every kind of mixer and cache as mlx-lm's own code differentiates the merged model."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from configs import changed, loss_config
from family_checks import COMPATIBLE, SCALE, Plain, build
from trainers import LORA, assert_close, gradients, gradients_of, make_policy, packed, trainer_of, unclipped

from mlx_parallm.config import Algorithm
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.train.context import Params
from mlx_parallm.train.data import Datum, SampledSpan, answered

KINDS = {
    "llama": "attention",
    "gemma4_text": "windows, and keys that layers share",
    "gemma3n": "keys that layers share, and inputs of each layer",
    "gemma2": "attention of its own",
    "gpt_oss": "sinks, windows and experts",
    "deepseek_v3": "latent attention and experts",
    "deepseek_v32": "latent attention that an indexer limits",
    "glm4_moe_lite": "latent attention without a rank of queries",
    "kimi_linear": "a delta rule with a decay of each number, and latent attention",
    "qwen3_5": "the gated delta rule",
    "qwen3_5_moe": "the gated delta rule and experts",
    "bailing_moe_linear": "linear attention",
    "mamba": "Mamba's states",
    "mamba2": "Mamba2's states",
    "nemotron_h": "Mamba2, attention and MLPs as layers",
    "granitemoehybrid": "Mamba2 and experts",
    "falcon_h1": "Mamba2 and attention in one layer",
    "jamba": "Mamba's states, experts and attention",
    "rwkv7": "RWKV's states, which two mixers of a layer share",
    "recurrent_gemma": "gated linear recurrences",
    "lfm2": "short convolutions",
    "baichuan_m1": "convolutions of keys and values",
    "iquestloopcoder": "layers that run twice",
    "gpt_bigcode": "positions that only whole rows have",
    "llama4": "attention in chunks",
}
QUICK = ("llama", "gemma4_text", "deepseek_v3", "qwen3_5_moe", "mamba")
SHARED = (7, 7, 9, 1, 30, 31, 32, 33, 34, 35)


def drawn() -> list[Datum]:
    """Answers to one prompt, of which two begin alike; an episode of two turns that begins as they do; and an answer to
    another prompt."""
    beginning = (40, 41, 42, 43, 44)
    answers = [(*beginning, 5), (*beginning, 6, 6, 6), (8, 9)]
    found = [answered(SHARED, answer, (), 1.0, 1.0 - 0.7 * number) for number, answer in enumerate(answers)]
    turns = (*SHARED, 8, 11, 12, 13, 14, 3, 4)
    weights = (0.0,) * len(SHARED) + (1.0, 1.0) + (0.0,) * 3 + (1.0, 1.0)
    sampled = (SampledSpan(10, 12), SampledSpan(15, 17))
    episode = Datum(turns, weights, tuple(0.4 * weight for weight in weights), sampled=sampled)
    return [*found, episode, answered((60, 61, 62), (63, 64, 65, 66), (), 1.0, -0.8)]


def of_merged(plain: Plain, params: Params, samples: Sequence[Datum]) -> mx.array:
    """−Σ A logπ / (N T), by mlx-lm's model with merged weights on each sequence alone."""
    value = mx.array(0.0)
    for sample in samples:
        at = mx.array(sample.trained())
        logits = plain.run(sample.token_ids, params).astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, -1, keepdims=True)
        logp = logprobs[at - 1, mx.array(sample.token_ids)[at]]
        value = value - (mx.array(sample.advantages)[at] * logp).mean() / len(samples)
    return value


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.ci) for name in KINDS if name not in QUICK)]
)
def test_an_update_has_the_gradients_of_the_merged_model(name: str, checkpointed: bool) -> None:
    model = build(name)
    targets = {spec.target for spec in adapter_layout(model).linears.values() if not (spec.chooses or spec.embedding)}
    lora = changed(LORA, lora_target_modules=tuple(sorted(targets)), lora_alpha=SCALE * LORA.lora_rank)
    settings = unclipped(
        gradient_checkpointing=checkpointed,
        micro_batch_tokens=1000,
        loss=loss_config(algorithm=Algorithm.GRPO, kl_coef=0.0),
    )
    trainer, _ = trainer_of(model, settings, lora, measure_kl=False, compatible=name in COMPATIBLE)
    policy = make_policy(trainer, moved=0.05)
    assert policy.scale == SCALE
    samples = drawn()
    assert packed(samples).branch.branches, "there is something to share"
    plain = Plain(name)
    plain._model.train()  # so that mlx-lm uses no kernel without a gradient
    want = gradients_of(lambda params: of_merged(plain, params, samples), policy)
    assert_close(gradients(trainer, policy, samples), want, 1e-4)
    assert max(np.abs(leaf).max() for leaf in want.values()) > 0
