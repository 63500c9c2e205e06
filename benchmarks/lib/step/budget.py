"""The time of a decode step on an M4 Max, as arithmetic over its counted bytes and launches. Nothing is measured.

Sources of the constants:
    bandwidth   Apple's 546 GB/s, of which 80 % are assumed to be reached
    launch      ml-explore/mlx#4521: 3,200 tiny dependent kernels take 8.8 ms on an M3 Ultra (MLX 0.32.2)
    rows        ml-explore/mlx#3852: 4-bit products of 5120 x 17408 by rows, against one row, on an M4 Pro (MLX 0.32.0);
                ml-explore/mlx#3863: flat from 10 to 32 rows, and once more as long for each further 32, on an M3 Max
"""

from dataclasses import asdict, dataclass
from itertools import pairwise

from benchmarks.lib.step.counting import Counts

BANDWIDTH = 0.8 * 546e9
LAUNCH_SECONDS = 8.8e-3 / 3200
_ROW_FACTORS = ((1, 1.0), (2, 1.0), (3, 1.13), (4, 1.43), (5, 1.75), (8, 2.84), (10, 4.5), (32, 4.5))
_TILE = 32


@dataclass(frozen=True, slots=True)
class Budget:
    """Milliseconds of one step.

    weights, head, keys_and_values, adapters, activations, sampling: their bytes at the bandwidth
    products: what the quantized products of several rows take beyond reading the weights and the head once
    launches: the fixed cost of all kernels
    total: all of these, as if nothing overlapped
    """

    weights: float
    head: float
    keys_and_values: float
    adapters: float
    activations: float
    sampling: float
    products: float
    launches: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def budget(counts: Counts, rows: int) -> Budget:
    """The arithmetic for a step of `rows` rows."""
    return Budget(
        weights=_read_ms(counts.weights),
        head=_read_ms(counts.head),
        keys_and_values=_read_ms(counts.keys_and_values),
        adapters=_read_ms(counts.adapters),
        activations=_read_ms(counts.activations),
        sampling=_read_ms(counts.sampling),
        products=_read_ms(counts.weights + counts.head) * (row_factor(rows) - 1),
        launches=1e3 * LAUNCH_SECONDS * counts.launches,
    )


def row_factor(rows: int) -> float:
    """How much longer a 4-bit product of several rows takes than one of one row."""
    if rows > _TILE:
        return _ROW_FACTORS[-1][1] * -(-rows // _TILE)
    for (low, start), (high, end) in pairwise(_ROW_FACTORS):
        if rows <= high:
            return start + (end - start) * (rows - low) / (high - low)
    raise ValueError(f"no factor for {rows} rows")


def _read_ms(nbytes: int) -> float:
    return 1e3 * nbytes / BANDWIDTH
