"""Many adapters in one batch: each row equals its adapter merged into the base and run alone."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from harness import Harness, assert_same_tokens, make_harness, solo
from lora import QV, layout_of, merged, random_adapter
from mixed_batch import TINY, changed_by, prompts
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear
from tiny import FAMILIES, stages, tiny_model

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import PromptScored, SamplingParams, SequenceOutput

pytestmark = pytest.mark.ci

OTHER_EXPERTS = ("qwen2_moe", "mixtral", "olmoe")
"""Families of `test_expert_adapters.py`."""


INPUTS = ("qkv_proj", "in_proj", "x_proj", "in_proj_qkvz")
OUTPUTS = ("up_proj", "gate_up_proj", "down_proj", "o_proj", "w1", "w2", "out_proj", "dt_proj", "in_proj_ba")
"""Names of linears in one family or another, beside those of most."""


def adapters_of(model: nn.Module) -> dict[str, AdapterWeights]:
    """Different ranks, scales and targets."""
    layout = layout_of(model)
    return {
        "all": random_adapter(layout, 1, rank=4),
        "qv": random_adapter(layout, 2, rank=8, targets=(*QV, *INPUTS), size=1.0, scale=0.5),
        "mlp": random_adapter(layout, 3, rank=1, targets=OUTPUTS, size=1.0),
    }


@pytest.mark.parametrize(
    ("family", "gathers"),
    [*stages([f for f in FAMILIES if f not in OTHER_EXPERTS], True), ("llama", False), ("qwen3_moe", False)],
)
def test_a_mixed_batch_equals_each_adapter_merged_and_run_alone(
    family: str, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each way to multiply factors."""
    if not gathers:
        monkeypatch.setattr("mlx_parallm.adapters.forward_context.gathers", lambda: False)
    changed = changed_by(lambda: tiny_model(family), adapters_of(tiny_model(family)), 12)
    assert changed.total() >= 6, "these adapters are to change what the base says"


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_prompt_logprobs_are_the_adapters_own(family: str) -> None:
    model = tiny_model(family)
    weights = random_adapter(layout_of(model), 4)
    harness = make_harness(model)
    ref = harness.publish("a", weights)
    row = prompts(1, 60, seed=8)[0] * 2
    harness.answer("s", row, 0, adapter=ref, prompt_logprobs=0)
    logits = merged(tiny_model(family), weights)(mx.array([row]))[0]
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    (scores,) = [event.logprobs for event in harness.of("s") if isinstance(event, PromptScored)]
    for at in range(1, len(row)):
        assert scores[at].logprob == pytest.approx(expected[at - 1, row[at]].item(), abs=TINY)
        better, doubtful = (expected[at - 1] > expected[at - 1, row[at]] + gap for gap in (TINY, -TINY))
        assert better.sum().item() < scores[at].rank <= doubtful.sum().item()


def quantized_llama() -> nn.Module:
    model = tiny_model("llama", intermediate_size=128)
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda path, part: isinstance(part, nn.Linear))
    mx.eval(model.parameters())
    return model


def with_lora_layers(model: nn.Module, weights: AdapterWeights) -> nn.Module:
    """mlx-lm's own LoRA layers over an unmerged base."""
    parts = dict(model.named_modules())
    layers = []
    for path, pair in weights.pairs.items():
        layer = LoRALinear.from_base(parts[path], r=pair.rank, scale=pair.scale)
        layer.lora_a, layer.lora_b = mx.array(pair.a), mx.array(pair.b)
        layers.append((path, layer))
    model.update_modules(tree_unflatten(layers))
    model.eval()
    return model


def test_a_mixed_batch_over_a_4_bit_base_equals_its_adapters_unmerged() -> None:
    layout = layout_of(quantized_llama())
    adapters = {f"a{i}": random_adapter(layout, i, rank=2 + i, targets=() if i % 2 else QV) for i in range(4)}
    harness = make_harness(quantized_llama())
    refs = {name: harness.publish(name, weights) for name, weights in adapters.items()}
    rows = prompts(4, 50, seed=4)
    for (name, ref), row in zip(refs.items(), rows, strict=True):
        harness.submit(name, row, 10, adapter=ref, sampling=SamplingParams(temperature=0.0, top_logprobs=0))
    harness.run()
    for name, row in zip(refs, rows, strict=True):
        tokens = harness.tokens(name)
        logits = with_lora_layers(quantized_llama(), adapters[name])(mx.array([row + tokens]))[0]
        expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        outputs = [event for event in harness.of(name) if isinstance(event, SequenceOutput)]
        for at, output in enumerate(outputs):
            want = expected[len(row) - 1 + at, tokens[at]].item()
            assert output.logprobs[0].logprob == pytest.approx(want, abs=1e-3)


# ---- versions -----------------------------------------------------------------------------------


def slot_bytes(harness: Harness, ref: AdapterRef) -> list[bytes]:
    """Everything the bank has in the slot of a version."""
    slot = harness.adapters.pin(ref)
    harness.adapters.unpin(ref)
    groups = [group for group in harness.adapters.bank.groups.values() if group.places]
    arrays = [array for group in groups for array in (group.a, group.b)]
    return [np.array(array[slot]).tobytes() for array in arrays]


def test_a_publish_leaves_other_slots_bit_identical() -> None:
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model, slots=3)
    kept = harness.publish("kept", random_adapter(layout, 1))
    before = slot_bytes(harness, kept)
    for seed in range(2, 8):
        harness.publish("other", random_adapter(layout, seed, rank=seed))
        if seed % 2:
            harness.answer(f"r{seed}", [1, 2, 3], 3, adapter=kept)
        assert slot_bytes(harness, kept) == before


def test_an_adapter_that_changes_fewer_linears_leaves_nothing_of_the_slots_last_tenant() -> None:
    model, row = tiny_model("llama"), [9, 8, 7, 6]
    layout = layout_of(model)
    small = random_adapter(layout, 2, rank=1, targets=("v_proj",))
    harness = make_harness(model, slots=1)
    harness.publish("big", random_adapter(layout, 1, rank=8))
    ref = harness.publish("small", small)
    harness.answer("r", row, 12, adapter=ref)
    assert_same_tokens(harness.tokens("r"), solo(merged(tiny_model("llama"), small), row, 12), TINY)


def test_rows_in_flight_keep_their_version_and_new_ones_get_the_new_one() -> None:
    model, row = tiny_model("llama"), prompts(1, 40, seed=6)[0]
    layout = layout_of(model)
    versions = [random_adapter(layout, seed) for seed in range(3)]
    harness = make_harness(model)
    registry = harness.adapters.registry
    refs = []
    for number, weights in enumerate(versions):
        harness.publish("policy", weights)
        refs.append(registry.find("policy").ref)
        harness.submit(str(number), row, 40, adapter=refs[-1])
        harness.step(5)
    harness.run()
    assert [str(ref) for ref in refs] == ["policy@1", "policy@2", "policy@3"]
    for number, weights in enumerate(versions):
        reference = solo(merged(tiny_model("llama"), weights), row, 40)
        assert_same_tokens(harness.tokens(str(number)), reference, TINY)


def test_the_same_name_with_new_weights_reuses_nothing_of_the_old() -> None:
    """Case 24: the same prompt under both versions, in a group whose rows are copies of one prefill."""
    model, row = tiny_model("llama"), prompts(1, 80, seed=7)[0]
    layout = layout_of(model)
    harness = make_harness(model)
    for number in range(3):
        weights = random_adapter(layout, 20 + number)
        ref = harness.publish("same", weights)
        harness.answer(str(number), row, 10, n=3, adapter=ref)
        reference = solo(merged(tiny_model("llama"), weights), row, 10)
        for index in range(3):
            assert_same_tokens(harness.tokens(str(number), index), reference, TINY)


def test_preempted_rows_come_back_with_their_own_version() -> None:
    model = tiny_model("llama")
    layout = layout_of(model)
    adapters = [random_adapter(layout, seed) for seed in range(4)]
    harness = make_harness(model, budget_tokens=704, slots=2)  # the bank takes half
    refs = [harness.publish(f"a{i}", weights) for i, weights in enumerate(adapters)]
    rows = prompts(8, 60, seed=9)
    for i, row in enumerate(rows):
        harness.submit(str(i), row, 50, adapter=refs[i % 4])
    harness.run()
    assert harness.loop.stats().preemptions_total > 0
    for i, row in enumerate(rows):
        reference = solo(merged(tiny_model("llama"), adapters[i % 4]), row, 50)
        assert_same_tokens(harness.tokens(str(i)), reference, TINY)
