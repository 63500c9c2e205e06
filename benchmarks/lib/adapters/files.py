"""Makes random adapters of the bundled model, in memory and as folders that a server loads."""

from collections.abc import Collection, Sequence
from pathlib import Path

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import numpy as np  # isort: skip
from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LoRAPair
from mlx_parallm.model.manager import SharedModelManager

RANK = 16
QV = ("q_proj", "v_proj")
_SIZE, _SCALE = 1.0, 2.0
"""With these, an adapter changes a linear's output by about the size of that output, so no two give the same text."""


def random_adapter(layout: AdapterLayout, seed: int, rank: int = RANK, targets: Collection[str] = ()) -> AdapterWeights:
    """An adapter with float32 factors on the layers' linears whose last name is in `targets`; on all by default."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for path, spec in layout.linears.items():
        if not targets or spec.target in targets:
            a = rng.standard_normal(spec.a_shape(rank), np.float32) / np.float32(spec.in_features**0.5)
            b = rng.standard_normal(spec.b_shape(rank), np.float32) * np.float32(_SIZE / _SCALE / rank**0.5)
            pairs[path] = LoRAPair(a, b, _SCALE)
    return AdapterWeights(pairs)


def fill(bank: AdapterBank, weights: AdapterWeights) -> None:
    """Writes one adapter into all slots of a bank."""
    for slot in reversed(range(1, bank.slots + 1)):  # the last slot first, so that the arrays grow once
        for _ in bank.write(slot, weights):
            pass


def write_adapters(folder: Path, names: Sequence[str]) -> None:
    """Writes one adapter folder per name. It loads the bundled model for its shapes, so it needs its own process."""
    layout = SharedModelManager(progress=False).adapter_layout
    for seed, name in enumerate(names):
        write_mlx_lm(folder / name, random_adapter(layout, seed), layout)
