"""The products of a pass with what the slots hold now, and on devices whose `gather_mm` is wrong."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from lora import layout_of, merged, random_adapter
from tiny import tiny_model

from mlx_parallm.adapters import forward_context
from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.model.families import relative_error
from mlx_parallm.model.linears import install_adapters

TOKENS = mx.arange(1, 6)[None]


def write(bank: AdapterBank, slot: int, weights: AdapterWeights) -> None:
    for _ in bank.write(slot, weights):
        pass


def merged_logits(weights: AdapterWeights) -> mx.array:
    return merged(tiny_model("llama"), weights)(TOKENS)


def adapted() -> tuple[nn.Module, AdapterBank]:
    model = tiny_model("llama")
    bank = AdapterBank(layout_of(model), 2, 4, mx.float32)
    install_adapters(model, bank)
    return model, bank


def test_a_pass_reads_what_its_slot_holds_after_passes_with_other_weights_and_after_the_arrays_grew() -> None:
    model, bank = adapted()
    targets = [("q_proj",), ("q_proj", "v_proj", "down_proj"), ("o_proj",)]
    for seed, names in enumerate(targets):
        weights = random_adapter(bank.layout, seed, targets=names)
        write(bank, 1, weights)
        with bank.forward([1], [TOKENS.size]):
            assert relative_error(model(TOKENS), merged_logits(weights)) < 1e-5


def test_tokens_of_several_slots_get_what_these_hold_after_the_arrays_grew_between_two_passes() -> None:
    """The second pass has the same slots and lengths as the first one, but more linears have factors."""
    model, bank = adapted()
    for seed, names in enumerate([(("q_proj",), ("v_proj",)), (("k_proj", "up_proj"), ("q_proj", "v_proj", "o_proj"))]):
        both = [random_adapter(bank.layout, 2 * seed + place, targets=each) for place, each in enumerate(names)]
        for slot, weights in enumerate(both, 1):
            write(bank, slot, weights)
        with bank.forward([2, 1, 0], [1, 1, 1]):
            logits = model(mx.array([[1], [1], [1]]))
        for row, weights in zip(logits, [both[1], both[0], None], strict=False):
            plain = tiny_model("llama") if weights is None else merged(tiny_model("llama"), weights)
            assert relative_error(row, plain(mx.array([[1]]))[0]) < 1e-5


def wrong(*_: object, **__: object) -> mx.array:
    return mx.zeros((3, 65, 12))


def refused(*_: object, **__: object) -> mx.array:
    raise ValueError("the width of the result is no multiple of 8")


@pytest.mark.parametrize("product", [wrong, refused])
def test_factors_are_copied_on_a_device_whose_gathered_products_are_wrong(
    product: Callable[..., mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, bank = adapted()
    both = [random_adapter(bank.layout, seed) for seed in (1, 2)]
    for slot, weights in enumerate(both, 1):
        write(bank, slot, weights)
    forward_context._gathers.cache_clear()
    monkeypatch.setattr(mx, "gather_mm", product)
    try:
        with bank.forward([1, 2], [1, 1]):
            logits = model(mx.array([[1], [1]]))
        assert not forward_context.gathers()
    finally:
        forward_context._gathers.cache_clear()
    for row, weights in enumerate(both):
        assert relative_error(logits[row], merged(tiny_model("llama"), weights)(mx.array([[1]]))[0]) < 1e-5
