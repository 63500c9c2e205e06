"""Adapters of experts, router and shared experts, in one batch: each row equals its adapter merged into the base."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import pytest
from harness import assert_same_tokens, make_harness, solo
from lora import QV, layout_of, merged, random_adapter
from mixed_batch import TINY, assert_logprobs, prompts
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear
from tiny import tiny_model

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core.requests import RequestFailed, RequestFinished
from mlx_parallm.errors import AdapterTooLargeError
from mlx_parallm.model.layout import adapter_layout

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")
EXPERTS = ("gate_proj", "up_proj", "down_proj")


def model_of(family: str) -> nn.Module:
    """With smaller logits than other tiny models, so that rounding leaves them equal within 1e-5."""
    model = tiny_model(family)
    model.lm_head.weight = 0.4 * model.lm_head.weight
    return model


def adapters_of(model: nn.Module) -> dict[str, AdapterWeights]:
    """Of experts, routers and attention, alone and together. In qwen2_moe, the linears of the shared expert have the
    names of those of the others."""
    layout = layout_of(model)
    return {
        "experts": random_adapter(layout, 1, rank=3, targets=EXPERTS),
        "down": random_adapter(layout, 2, rank=8, targets=("down_proj",), size=1.0, scale=0.5),
        "router": random_adapter(layout, 3, rank=2, targets=("gate", "shared_expert_gate"), size=1.0),
        "all": random_adapter(layout, 4, rank=4),
        "attention": random_adapter(layout, 5, targets=QV),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_16_mixed_rows_are_those_of_their_merged_models(family: str) -> None:
    """Of prompts, which are computed in chunks whose tokens `SwitchGLU` sorts, and of answers, token by token."""
    assert_logprobs(partial(model_of, family), adapters_of(model_of(family)), 16)


def quantized() -> nn.Module:
    model = tiny_model("qwen3_moe")
    nn.quantize(model, group_size=32, bits=8, class_predicate=lambda _, part: isinstance(part, SwitchLinear))
    mx.eval(model.parameters())
    return model


def test_experts_of_a_quantized_base_have_the_outputs_of_mlx_lms_own_lora_layers() -> None:
    weights = random_adapter(layout_of(quantized()), 1, targets=EXPERTS)
    model, parts = quantized(), dict(quantized().named_modules())
    layers = []
    for path, pair in weights.pairs.items():
        layer = LoRASwitchLinear.from_base(parts[path], r=pair.rank, scale=pair.scale)
        layer.lora_a, layer.lora_b = (mx.array(each.swapaxes(1, 2)) for each in (pair.a, pair.b))
        layers.append((path, layer))
    model.update_modules(tree_unflatten(layers))
    harness, row = make_harness(quantized()), prompts(1, 60, seed=4)[0]
    harness.answer("r", row, 8, adapter=harness.publish("a", weights))
    assert_same_tokens(harness.tokens("r"), solo(model.eval(), row, 8), 1e-4)


def test_rows_read_no_slot_that_a_group_of_linears_lacks() -> None:
    """The arrays of one linear have as many slots as those of the others, although few adapters change it."""
    model = tiny_model("llama")
    layout, row = layout_of(model), [9, 8, 7, 6]
    harness = make_harness(model, slots=8)
    adapters = [random_adapter(layout, 1, targets=("o_proj",))]
    adapters += [random_adapter(layout, seed, targets=("v_proj",)) for seed in range(2, 8)]
    adapters += [random_adapter(layout, 9, targets=("down_proj",))]
    refs = [harness.publish(f"a{at}", weights) for at, weights in enumerate(adapters)]
    assert {group.slots for group in harness.adapters.bank.groups.values() if group.places} == {9}
    for at, ref in enumerate(refs):
        harness.submit(str(at), row, 6, adapter=ref)
    harness.run()
    for at, weights in enumerate(adapters):
        assert_same_tokens(harness.tokens(str(at)), solo(merged(tiny_model("llama"), weights), row, 6), TINY)


def test_experts_in_another_kind_of_layer_are_refused_by_name() -> None:
    class OtherLayer(SwitchGLU):
        """Might sort in another way."""

    model = tiny_model("qwen3_moe")
    model.model.layers[0].mlp.switch_mlp = OtherLayer(64, 32, 4)
    layout = adapter_layout(model)
    assert layout.refused["model.layers.0.mlp.switch_mlp.down_proj"] == "expert LoRA"
    assert "model.layers.1.mlp.switch_mlp.down_proj" in layout.linears


def test_an_adapter_that_memory_cannot_hold_is_refused_with_its_size() -> None:
    """Requests for it fail, and others are served."""
    model = tiny_model("qwen3_moe")
    adapters, harness = adapters_of(model), make_harness(model)
    attention = harness.publish("attention", adapters["attention"])
    harness.adapters.bank.limit = 2 * harness.adapters.bytes_held
    large = harness.publish("large", adapters["experts"], staged=False)
    version = harness.adapters.registry.version(large)
    with pytest.raises(AdapterTooLargeError, match=r"needs \S+ KiB for 3 slots of rank 8, and may take \S+ KiB"):
        harness.wait(harness.adapters.stage(version, adapters["experts"]))
    for at in range(2):
        harness.submit(f"large {at}", [1, 2], 3, adapter=large)
        harness.submit(f"attention {at}", [1, 2], 3, adapter=attention)
        harness.run()
        assert isinstance(harness.terminal(f"large {at}"), RequestFailed)
        assert isinstance(harness.terminal(f"attention {at}"), RequestFinished)
