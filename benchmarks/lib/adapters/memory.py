"""Compares the memory that an adapter takes in the bank with the size of its file.

Two full banks of 4 and 12 slots differ by 8 adapters; what they have in common (slot 0) cancels.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from benchmarks.lib.adapters.files import QV, RANK, random_adapter
from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights
from mlx_parallm.model.manager import SharedModelManager

FEW, MANY = 4, 12
HALF_RANK = RANK // 2


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """Bytes of one kind of adapter: in a bank that holds only this kind, and in its file.

    `slot_zero`: bytes of slot 0, the zeros that the base model uses. `unused`: bytes of the 8 empty slots of a bank of
    12 slots that holds 4 adapters.
    """

    name: str
    each: float
    file: int
    slot_zero: float
    unused: float

    @property
    def ratio(self) -> float:
        return self.each / self.file


ALL, QV_ONLY, QV_BESIDE_ALL = "all linears, rank 16", "q/v, rank 16", "q/v, rank 16, in a bank of all linears"
RANK_8 = f"all linears, rank {HALF_RANK} in slots of rank {RANK}"


def measure() -> list[AdapterMemory]:
    """In this process."""
    layout = SharedModelManager(progress=False).adapter_layout
    everything = random_adapter(layout, seed=0)
    return [
        _memory(ALL, layout, everything),
        _memory(RANK_8, layout, random_adapter(layout, seed=0, rank=HALF_RANK)),
        _memory(QV_ONLY, layout, _qv(layout)),
        _memory(QV_BESIDE_ALL, layout, _qv(layout), everything),
    ]


def _memory(
    name: str, layout: AdapterLayout, weights: AdapterWeights, last: AdapterWeights | None = None
) -> AdapterMemory:
    """Measures one kind of adapter. `last` replaces the last adapter of the bank."""
    few = _held_bytes(layout, FEW, FEW, weights, last)
    each = (_held_bytes(layout, MANY, MANY, weights, last) - few) / (MANY - FEW)
    slot_zero = few - FEW * each
    grown = _held_bytes(layout, MANY, FEW, weights, last)
    return AdapterMemory(name, each, _file_bytes(layout, weights), slot_zero, grown - few)


def _held_bytes(
    layout: AdapterLayout, slots: int, adapters: int, weights: AdapterWeights, last: AdapterWeights | None
) -> int:
    """Bytes that MLX holds in addition after a bank of `slots` slots has been filled with `adapters`."""
    before = mx.get_active_memory()
    bank = AdapterBank(layout, slots, RANK, mx.float32)
    for slot in range(1, adapters + 1):
        for _ in bank.write(slot, last if last is not None and slot == adapters else weights):
            pass
    return int(mx.get_active_memory() - before)


def _file_bytes(layout: AdapterLayout, weights: AdapterWeights) -> int:
    with tempfile.TemporaryDirectory(prefix="adapter_memory_") as folder:
        write_mlx_lm(Path(folder), weights, layout)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def _qv(layout: AdapterLayout) -> AdapterWeights:
    return random_adapter(layout, seed=0, targets=QV)
