"""The time of a decode step, as arithmetic over its counted bytes and launches: on an M4 Max, or with the rates of a
machine that `mlx_parallm bench --report` has measured.

Sources of the rates of the M4 Max:
    bandwidth   Apple's 546 GB/s, of which 80 % are assumed to be reached
    launch      ml-explore/mlx#4521: 3,200 tiny dependent kernels take 8.8 ms on an M3 Ultra (MLX 0.32.2)
    rows        ml-explore/mlx#3852: 4-bit products of 5120 x 17408 by rows, against one row, on an M4 Pro (MLX 0.32.0);
                ml-explore/mlx#3863: flat from 10 to 32 rows, and once more as long for each further 32, on an M3 Max
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks.lib.step.counting import Counts


@dataclass(frozen=True, slots=True)
class Rates:
    """bandwidth: bytes a second.  launch: seconds of a kernel.  products: by the rows of a quantized product, how many
    times as long as one of one row it takes; from the last number on, they grow by tiles of 32."""

    bandwidth: float
    launch: float
    products: tuple[tuple[int, float], ...]

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> "Rates":
        """Those that a report has.

        Raises:
            ValueError: it is of a CPU, or has none.
        """
        if report["machine"]["backend"] == "cpu":
            raise ValueError("the arithmetic is about GPUs, and the report is of a CPU")
        facts = report["sections"].get("device", {}).get("facts")
        if not facts:
            raise ValueError("the report has no rates; write it again with this version")
        products = {int(rows): seconds for rows, seconds in facts["products_s"].items()}
        factors = tuple((rows, seconds / products[1]) for rows, seconds in products.items())
        return cls(facts["read_bytes_per_s"], facts["launch_s"], factors)


M4_MAX = Rates(
    0.8 * 546e9,
    8.8e-3 / 3200,
    ((1, 1.0), (2, 1.0), (3, 1.13), (4, 1.43), (5, 1.75), (8, 2.84), (10, 4.5), (32, 4.5)),
)
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


def budget(counts: Counts, rows: int, rates: Rates = M4_MAX) -> Budget:
    """The arithmetic for a step of `rows` rows."""

    def read_ms(nbytes: int) -> float:
        return 1e3 * nbytes / rates.bandwidth

    return Budget(
        weights=read_ms(counts.weights),
        head=read_ms(counts.head),
        keys_and_values=read_ms(counts.keys_and_values),
        adapters=read_ms(counts.adapters),
        activations=read_ms(counts.activations),
        sampling=read_ms(counts.sampling),
        products=read_ms(counts.weights + counts.head) * (row_factor(rows, rates) - 1),
        launches=1e3 * rates.launch * counts.launches,
    )


def row_factor(rows: int, rates: Rates = M4_MAX) -> float:
    """How much longer a 4-bit product of several rows takes than one of one row."""
    if rows > _TILE:
        return rates.products[-1][1] * -(-rows // _TILE)
    for (low, start), (high, end) in pairwise(rates.products):
        if rows <= high:
            return start + (end - start) * (rows - low) / (high - low)
    raise ValueError(f"no factor for {rows} rows")
