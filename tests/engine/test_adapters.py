"""Many adapters in one batch: each row equals its adapter merged into the base and run alone."""

from __future__ import annotations

import mlx.nn as nn
import numpy as np
import pytest
from harness import Harness, assert_same_tokens, make_harness, solo
from lora import QV, layout_of, merged, random_adapter
from mixed_batch import TINY, changed_by
from tiny import FAMILIES, stages, tiny_model

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core.adapters import AdapterRef

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
