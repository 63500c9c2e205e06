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


def write(bank: AdapterBank, slot: int, weights: AdapterWeights) -> None:
    for _ in bank.write(slot, weights):
        pass


def adapted() -> tuple[nn.Module, AdapterBank]:
    model = tiny_model("llama")
    bank = AdapterBank(layout_of(model), 2, 4, mx.float32)
    install_adapters(model, bank)
    return model, bank


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


def test_what_a_pass_has_computed_is_freed_at_its_end() -> None:
    """The context of a pass is kept for the next one, but none of its arrays."""
    model, bank = adapted()
    write(bank, 1, random_adapter(bank.layout, 1))
    tokens = mx.zeros((1, 2000), mx.int32)
    mx.eval(model.parameters(), tokens)
    before = mx.get_active_memory()
    with bank.forward([1], [2000]):
        mx.eval(model(tokens))
    kept = mx.get_active_memory() - before
    assert kept < 2000 * bank.layout.hidden * 4
