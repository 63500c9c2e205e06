"""Whether a decode step gains if q, k and v, and gate and up, are one product each.

    python benchmarks/joined.py [--only times launches] [--rows 1 8 16] [--repeats 15] [--out FILE]

times: steps of the bundled model on this machine, with separate and with joined products, in turn. About 2 minutes;
    nothing else should run meanwhile.
launches: kernels that a Mac's GPU would launch, counted from the graphs, and the time of a step of Llama-3.1-8B in
    4 bits on an M4 Max by the arithmetic of `step.py`. Seconds, on any machine.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from lib import machine, report
from lib.adapters.files import RANK, fill, random_adapter
from lib.figures import Figure, ratios, reported
from lib.step.budget import budget
from lib.step.counting import Counts, count
from lib.step.decode import Decoder, Rows
from lib.step.graph import Kind, placeholder
from lib.step.joined import join
from lib.step.models import LLAMA_8B, SLOTS, ShapedModel, build, runner_of
from lib.step.stand_ins import Recorder, gpu_graphs, new_arrays_without_memory

from mlx_parallm.app.device import build_runner
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.config import Config
from mlx_parallm.model.manager import SharedModelManager

RECORD = Path(__file__).parent / "results" / "joined.json"
PARTS = ("times", "launches")
CONTEXT = 512
_STEPS = 3
"""Steps of one measurement."""
_WARM_UP = 2
_ADAPTERS = 8


def main() -> int:
    """Returns 0: nothing has a limit."""
    arguments = _arguments()
    before = machine.describe()
    figures = list(_launches(arguments.rows)) if "launches" in arguments.only else []
    if "times" in arguments.only:
        machine.warn_if_busy()
        figures += _times(arguments.rows, arguments.repeats)
    report.show(figures)
    report.write(arguments.out, {"machine": before, "setting": report.setting(arguments)}, figures)
    print(f"written to {arguments.out}")
    return 0


def _wanted(rows: Sequence[int]) -> list[Rows]:
    return [Rows.of([CONTEXT] * each) for each in rows] + [Rows.of([CONTEXT] * max(rows), adapters=_ADAPTERS)]


# ---- times -------------------------------------------------------------------------------------


def _times(rows: Sequence[int], repeats: int) -> Iterator[Figure]:
    separate, joined = _runner(joined=False), _runner(joined=True)
    for wanted in _wanted(rows):
        steps = _STEPS * (_WARM_UP + repeats)
        decoders = [Decoder(runner, wanted, room=steps) for runner in (separate, joined)]
        taken = [_pair(decoders, first=number % 2) for number in range(_WARM_UP + repeats)][_WARM_UP:]
        for decoder in decoders:
            decoder.close()
        alone, together = map(list, zip(*taken, strict=True))
        yield Figure(f"{wanted.text}: separate products", "ms", *reported(alone))
        gain = ratios(alone, together)
        yield Figure(f"{wanted.text}: gain of joined ones", "x", gain, gain.median)
        print(f"  {wanted.text}: {gain.text(3)}", flush=True)


def _pair(decoders: Sequence[Decoder], first: int) -> tuple[float, float]:
    """Milliseconds of a step with each of two decoders, of which the one at `first` goes first."""
    taken = {place: _milliseconds(decoders[place]) for place in (first, 1 - first)}
    return taken[0], taken[1]


def _milliseconds(decoder: Decoder) -> float:
    started = time.perf_counter()
    for _ in range(_STEPS):
        mx.eval(decoder.step())
    return 1e3 * (time.perf_counter() - started) / _STEPS


def _runner(joined: bool) -> BatchRunner:
    manager = SharedModelManager(progress=False)
    bank = manager.install_bank(SLOTS, RANK)
    fill(bank, random_adapter(bank.layout, seed=0, targets=()))
    if joined:
        join(manager.model)
        mx.eval(manager.model.parameters())
    return build_runner(manager, bank, Config())


# ---- launches ----------------------------------------------------------------------------------


def _launches(rows: Sequence[int]) -> Iterator[Figure]:
    with gpu_graphs() as recorder:
        separate, joined = build(LLAMA_8B), build(LLAMA_8B)
        join(joined.model, _placeholder)
        for wanted in _wanted(rows):
            before, after = (_counted(model, wanted, recorder) for model in (separate, joined))
            name = f"{LLAMA_8B.name}, {wanted.text}"
            yield Figure(f"{name}: launches", "", *reported([before.launches]))
            yield Figure(f"{name}: launches, joined", "", *reported([after.launches]))
            times = [budget(each, len(wanted.contexts)).total for each in (before, after)]
            yield Figure(f"{name}: gain on an M4 Max, arithmetic", "x", *reported([times[0] / times[1]]))


def _counted(model: ShapedModel, rows: Rows, recorder: Recorder) -> Counts:
    def prepare() -> Callable[[], list[mx.array]]:
        with new_arrays_without_memory(Kind.KEYS_AND_VALUES):
            return Decoder(runner_of(model), rows).step

    return count(prepare, recorder)


def _placeholder(arrays: Sequence[mx.array]) -> mx.array:
    shape = (sum(array.shape[0] for array in arrays), *arrays[0].shape[1:])
    return placeholder(shape, arrays[0].dtype, Kind.WEIGHTS)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RECORD)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
