"""The bundled model in several precisions, some of which a server on a CPU would not keep.

    float32            dense
    bfloat16           dense: weights and activations in bfloat16
    bfloat16 widened   the weights of the one above, computed in float32
    4-bit              the weights as they are stored, activations in float32
    4-bit bf16         the same with scales and activations in bfloat16, as most quantized models are published
    coarse             float32 over weights that were rounded once more, as in a copy of 6 bits

On a CPU, MLX multiplies bfloat16 matrices slowly. There the products of a bfloat16 base are computed by the BLAS from
float32 copies of the weights, and rounded. A product of two bfloat16 numbers is exact in float32, and a GPU adds them
up in float32 too, so these are the numbers of a GPU but for the order of the additions.
"""

from __future__ import annotations

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn
from mlx.utils import tree_map

from mlx_parallm.model.device import on_cpu
from mlx_parallm.model.loading import load
from mlx_parallm.model.manager import SharedModelManager

FLOAT32, BFLOAT16, WIDENED, COARSE = "float32", "bfloat16", "bfloat16 widened", "coarse"
FOUR_BITS, FOUR_BITS_BF16 = "4-bit", "4-bit bf16"
COARSE_BITS, COARSE_GROUP = 6, 64
FEW_ROWS = 64


class RoundedLinear(nn.Linear):  # type: ignore[misc]
    """A linear over bfloat16, whose weights are kept in float32."""

    def __call__(self, x: mx.array) -> mx.array:
        """bfloat16 [..., in] → bfloat16 [..., out]."""
        return _product(self, x)


class RoundedEmbedding(nn.Embedding):  # type: ignore[misc]
    """An embedding in bfloat16, whose weights are kept in float32."""

    def __call__(self, tokens: mx.array) -> mx.array:
        """Token ids [...] → bfloat16 [..., hidden]."""
        return self.weight[tokens].astype(mx.bfloat16)

    def as_linear(self, x: mx.array) -> mx.array:
        """bfloat16 [..., hidden] → bfloat16 [..., vocab]."""
        return _product(self, x)


def _product(layer: nn.Module, x: mx.array) -> mx.array:
    """x [..., in] Wᵀ, rounded to bfloat16. Few rows are added up in two halves: on a GPU, the kernels for few and for
    many rows add in different orders, whereas a BLAS adds in the same one."""
    rows = x.reshape(-1, x.shape[-1]).astype(mx.float32)
    if len(rows) > FEW_ROWS:
        y = rows @ layer.weight.T
    else:
        one, other = mx.split(rows, 2, -1)
        y = one @ layer._halves[0] + other @ layer._halves[1]
    return y.astype(mx.bfloat16).reshape(*x.shape[:-1], -1)


_ROUNDED: dict[type, type] = {nn.Linear: RoundedLinear, nn.Embedding: RoundedEmbedding}


def base(kind: str, path: str | None = None, fast: bool = True) -> SharedModelManager:
    """The model in one of these precisions, without a bank.

    Args:
        path: another model than the bundled one.
        fast: on a CPU, compute bfloat16 products with the BLAS.
    """
    loaded = load(path, dequantize=kind not in (FOUR_BITS, FOUR_BITS_BF16), progress=False)
    if kind in (BFLOAT16, WIDENED, FOUR_BITS_BF16):
        cast(loaded.model, mx.bfloat16)
    if kind == WIDENED:
        cast(loaded.model, mx.float32)
    if kind == COARSE:
        _make_coarse(loaded.model)
    kinds = [(module, type(module)) for module in loaded.model.modules()]
    manager = SharedModelManager(loaded.name, progress=False, loaded=loaded)
    if manager.plan.layout.dtype != mx.float32 and on_cpu():
        for module, own in kinds:  # the manager has put classes in place that compute in float32
            module.__class__ = own
            if fast and kind == BFLOAT16 and own in _ROUNDED:
                _compute_by_blas(module)
    return manager


def _compute_by_blas(module: nn.Module) -> None:
    module.__class__ = _ROUNDED[type(module)]
    module.weight = module.weight.astype(mx.float32)
    module._halves = [mx.contiguous(half.T) for half in mx.split(module.weight, 2, -1)]
    mx.eval(module.weight, module._halves)


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Gives all floating-point arrays of a model this type, lazily."""

    def of_type(array: mx.array) -> mx.array:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map(of_type, model.parameters()))


def _make_coarse(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is nn.Linear:
            packed = mx.quantize(module.weight, COARSE_GROUP, COARSE_BITS)
            module.weight = mx.dequantize(*packed, COARSE_GROUP, COARSE_BITS)
