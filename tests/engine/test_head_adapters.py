"""Adapters of the output head, in one batch with others: each row equals its adapter merged into the base."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from harness import Harness, assert_same_tokens, make_harness, solo
from lora import QV, every_target, layout_of, merged, random_adapter
from mixed_batch import TINY, changed_by, prompts
from tiny import VOCAB_SIZE, tiny_model

from mlx_parallm.adapters import forward_context
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import SamplingParams, SequenceOutput
from mlx_parallm.kv.device_memory import MemoryAccount

pytestmark = pytest.mark.ci

NEAR = 1e-4
"""Of logprobs: a tied random model's logits reach ±70, where float32 is good for 4e-6 of them."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "qwen2, tied": ("qwen2", {}),
    "gemma2, tied, with attention of its own": ("gemma2", {}),
    "gemma3, in a language part": ("gemma3", {}),
    "phi3": ("phi3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
}


def model_of(name: str) -> nn.Module:
    family, config = MODELS[name]
    return tiny_model(family, **config)


def adapters_of(model: nn.Module) -> dict[str, AdapterWeights]:
    """With and without the head, of different ranks and scales."""
    layout = layout_of(model)
    return {
        "head": random_adapter(layout, 1, rank=3, targets=("lm_head",), size=1.0, scale=0.5),
        "all": random_adapter(layout, 2, rank=8, targets=every_target(layout)),
        "layers": random_adapter(layout, 3, rank=2),
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_mixed_batch_equals_each_adapter_merged_and_run_alone(name: str) -> None:
    """Merged, a tied model's embedding looks tokens up as before."""
    model = partial(model_of, name)
    changed = changed_by(model, adapters_of(model()), 8)
    assert changed["head"], "an adapter of the head alone is to change what the base says"


def logprobs_of(model: nn.Module, tokens: list[int]) -> mx.array:
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize("name", ["llama", "tied llama", "gemma2, tied, with attention of its own"])
def test_logprobs_of_prompts_and_answers_are_the_rows_own(name: str) -> None:
    """Rows with and without a head adapter are scored and drawn from in the same forward passes."""
    adapters = adapters_of(model_of(name))
    harness = make_harness(model_of(name))
    refs = {each: harness.publish(each, weights) for each, weights in adapters.items()} | {"base": BASE_ADAPTER}
    rows = dict(zip(refs, prompts(4, 60, seed=8), strict=True))
    sampling = SamplingParams(temperature=0.0, top_logprobs=0)
    for each, row in rows.items():
        harness.submit(each, row, 6, adapter=refs[each], sampling=sampling, prompt_logprobs=0)
    harness.run()
    for each, row in rows.items():
        drawn = harness.tokens(each)
        model = merged(model_of(name), adapters[each]) if each in adapters else model_of(name)
        expected = logprobs_of(model, row + drawn)
        _started, scores, *events = harness.of(each)
        for at in range(1, len(row)):
            assert scores.logprobs[at].logprob == pytest.approx(expected[at - 1, row[at]].item(), abs=NEAR)
        outputs = [event for event in events if isinstance(event, SequenceOutput)]
        assert len(outputs) == len(drawn)
        for at, output in enumerate(outputs):
            want = expected[len(row) - 1 + at, drawn[at]].item()
            assert output.logprobs[0].logprob == pytest.approx(want, abs=NEAR)


def test_a_slot_keeps_nothing_of_the_head_of_its_last_tenant() -> None:
    model, row = model_of("tied llama"), [9, 8, 7, 6]
    layout = layout_of(model)
    small = random_adapter(layout, 2, rank=1, targets=("v_proj",))
    harness = make_harness(model, slots=1)
    harness.publish("head", random_adapter(layout, 1, rank=8, targets=("lm_head",), size=2.0))
    ref = harness.publish("small", small)
    harness.answer("r", row, 12, adapter=ref)
    assert_same_tokens(harness.tokens("r"), solo(merged(model_of("tied llama"), small), row, 12), TINY)


# ---- what it costs ------------------------------------------------------------------------------


def run_rows(harness: Harness, refs: list[AdapterRef]) -> None:
    for at, ref in enumerate(refs):
        harness.submit(f"{ref}/{at}", [5, 6, 7 + at], 4, adapter=ref)
    harness.run()


@pytest.mark.parametrize("name", ["llama", "tied llama"])
def test_rows_without_a_head_adapter_compute_no_product_for_the_head(name: str, monkeypatch) -> None:
    model = model_of(name)
    adapters, widths = adapters_of(model), []

    def counting(add: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def counted(run: Any, y: mx.array, *arguments: Any) -> mx.array:
            widths.append(y.shape[-1])
            return add(run, y, *arguments)

        return counted

    for kind in (forward_context._SameSlot, forward_context._OwnSlots):
        monkeypatch.setattr(kind, "add", counting(kind.add))
    harness = make_harness(model)
    refs = {each: harness.publish(each, weights) for each, weights in adapters.items()}
    run_rows(harness, [BASE_ADAPTER] * 2)
    assert widths == []
    run_rows(harness, [BASE_ADAPTER, refs["layers"], refs["layers"]])
    assert widths, "the layers have adapters"
    assert VOCAB_SIZE not in widths
    run_rows(harness, [refs["layers"], refs["head"]])
    assert VOCAB_SIZE in widths


def test_the_bank_has_room_for_the_head_once_an_adapter_needs_it_and_it_is_accounted_for() -> None:
    model = model_of("tied llama")
    layout = layout_of(model)
    assert layout.head is not None
    harness = make_harness(model, slots=8, max_rank=8)
    head = harness.adapters.bank.groups[layout.head.group]
    harness.publish("layers", random_adapter(layout, 1, targets=QV))
    held = harness.adapters.bytes_held
    assert head.nbytes == 0
    harness.publish("head", random_adapter(layout, 2, targets=("lm_head",)))
    slots = 4  # of a new array, slot 0 included
    assert head.nbytes == slots * 8 * (layout.head.in_features + VOCAB_SIZE) * 4
    assert harness.adapters.bytes_held == held + head.nbytes
    device = harness.runner.cache.device
    assert device.bytes_by_account()[MemoryAccount.ADAPTERS] == harness.adapters.bytes_held


def test_sampled_tokens_are_drawn_from_the_adapted_distribution() -> None:
    name, row, sampling = "tied llama", [1, 2, 3], SamplingParams(temperature=1.0, seed=3)
    weights = adapters_of(model_of(name))["head"]
    harness = make_harness(model_of(name))
    ref = harness.publish("head", weights)
    harness.submit("head", row, 12, adapter=ref, sampling=sampling)
    harness.submit("base", row, 12, sampling=sampling)
    harness.run()
    alone = make_harness(merged(model_of(name), weights))
    alone.answer("merged", row, 12, sampling=sampling)
    assert harness.tokens("head") == alone.tokens("merged") != harness.tokens("base")
