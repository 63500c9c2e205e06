"""A whole decode step of this engine beside one of mlx-lm's `BatchGenerator`: counts, and the time of the host.

The counts are the same on every machine. The time is that of the thread that builds the graph, in one process, a step
of each in turn; nothing is computed, and each fused kernel is one cheap primitive on both sides.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS
from benchmarks.lib.figures import Spread, ratios
from benchmarks.lib.step.counting import count, nodes
from benchmarks.lib.step.engines import Batch, MlxLm, Models, Ours
from benchmarks.lib.step.models import BUNDLED, HYBRID_4B, LLAMA_1B, QWEN3_8B, Architecture
from benchmarks.lib.step.stand_ins import Recorder, Unrecorded, gpu_graphs

import mlx.core as mx  # isort: skip

MODELS = {"bundled": BUNDLED, "1b": LLAMA_1B, "8b": QWEN3_8B, "hybrid": HYBRID_4B}
ROWS, CONTEXTS = (1, 4, 8, 16, 32), (500, 4000)
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class StepCounts:
    """kernels: launched on Metal
    nodes: primitives of the graph, of which a fused kernel or fusion is one
    waits: calls that wait for the device
    copies: launches while the step before is in flight, which make each write in place a copy of the whole array
    traffic: bytes read and written beside weights, adapters, and stored keys and values
    """

    kernels: int
    nodes: int
    waits: int
    copies: int
    traffic: int


@dataclass(frozen=True, slots=True)
class Compared:
    """mlx-lm has no step whose rows have adapters of their own; theirs is the base model's."""

    ours: StepCounts
    theirs: StepCounts

    def ratio(self, what: str) -> float:
        ours, theirs = (getattr(counts, what) for counts in (self.ours, self.theirs))
        return float(ours / theirs)


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Milliseconds of the host, and the ratio of each step of ours to mlx-lm's that followed it."""

    ours: float
    theirs: float
    ratio: Spread


def batches(quick: bool = False) -> Iterator[Batch]:
    """Rows of 500 tokens in every way; rows of 4,000 greedily, and 16 in every way. `quick`: 1 and 16 of 500."""
    for context in CONTEXTS[: 1 if quick else None]:
        for rows in (1, 16) if quick else ROWS:
            yield Batch(rows, context)
            if rows > 1:
                yield Batch(rows, context, kernel=True)
            if rows == 16:
                yield Batch(rows, context, adapters=8, kernel=True)
            if context > CONTEXTS[0] and rows != 16:
                continue
            yield Batch(rows, context, sampled=True)
            yield Batch(rows, context, adapters=1)
            if rows >= 8:
                yield Batch(rows, context, adapters=8)


def counted(architecture: Architecture, wanted: Iterable[Batch]) -> dict[Batch, Compared]:
    with gpu_graphs() as recorder:
        models = Models(architecture)
        return {
            batch: Compared(*(_counts(side, recorder) for side in _sides(models, batch, recorder))) for batch in wanted
        }


def timed(architecture: Architecture, wanted: Iterable[Batch], repeats: int) -> dict[Batch, HostTimes]:
    with gpu_graphs(Unrecorded()) as recorder:
        models = Models(architecture)
        return {batch: _times(list(_sides(models, batch, recorder)), repeats) for batch in wanted}


def _sides(models: Models, batch: Batch, recorder: Recorder) -> Iterator[Ours | MlxLm]:
    yield Ours(models, batch, recorder)
    yield MlxLm(models, batch, recorder)


def _counts(side: Ours | MlxLm, recorder: Recorder) -> StepCounts:
    def step() -> list[mx.array]:
        side.build()
        return side.left()

    def prepare() -> Callable[[], list[mx.array]]:
        side.cut()
        return step

    counts = count(prepare, recorder)
    waits, copies = recorder.waits, recorder.ahead
    built = nodes(prepare, recorder)
    side.close()
    return StepCounts(counts.launches, built, waits, copies, counts.activations + counts.sampling)


def _times(sides: list[Ours | MlxLm], repeats: int) -> HostTimes:
    taken: list[list[float]] = [[], []]
    gc.collect()
    gc.freeze()
    for _ in range(WARM_UP + repeats):
        for side, seconds in zip(sides, taken, strict=True):
            started = time.thread_time()
            side.build()
            seconds.append(time.thread_time() - started)
            side.cut()
    gc.unfreeze()
    for side in sides:
        side.close()
    ours, theirs = (seconds[WARM_UP:] for seconds in taken)
    return HostTimes(1e3 * statistics.median(ours), 1e3 * statistics.median(theirs), ratios(ours, theirs))
