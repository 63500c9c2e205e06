"""Compares our learning with that of TRL 1.16 on a CPU: the same model, data, adapters and hyper-parameters.

    python benchmarks/studies/beside_trl.py [--only exact sentiment …] [--seeds 0 1 2 3 4] [--updates 12]
        [--sides ours TRL …] [--learning-rate 1e-3] [--resume] [--together] [--work DIR] [--out FILE] [--plot FILE]

`exact`: one update from the same answers and the same adapter, by both: how far apart are losses, gradients and what
is learnt? Then GRPO (the loss dapo) on four tasks: `sentiment` and `one word` of `lib/training/learning_tasks.py`,
`sums` in the form of GSM8K after a few examples, and `both words`, whose second turn depends on the first answer. Then
`dpo` and `kto` on pairs that a rule makes. Each cell (a side, a task, a seed) is a process of its own with one thread,
and the record is written after each one; --resume keeps the cells of the record. With --together, both sides of a cell
run at the same time, which changes how long they take and nothing that they learn; the record has their processor time
too. `times` measures three of them in turns, without anything beside them. TRL's side is a script with an environment
of its own, made by uv, which downloads 3 GB once.

Both sides have the same learning rate. Our steps are also bounded by `max_kl_step`, and smaller if only some groups
have a signal; TRL's are not. More of --sides are ours without the first, and without both.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, ratios, reported
from benchmarks.lib.training.beside_cells import (
    CHANGED,
    DPO,
    KTO,
    SIDES,
    Bench,
    Cell,
    adapters_apart,
    gradients_apart,
)
from benchmarks.lib.training.beside_plot import plot
from benchmarks.lib.training.beside_tasks import ADAPTER, TASKS, Order, Setting

EXACT, TIMES = "exact", "times"
PREFERENCES = (DPO, KTO)
PARTS = (EXACT, *TASKS, *PREFERENCES, TIMES)
APART = 1e-4
LAST = 4
"""Updates at the end of a run over which its reward is averaged."""
EXACT_LOSSES = {"sentiment": ("dapo", "grpo", "dr_grpo"), "both words": ("dapo",)}
MOST_PREFERENCE_UPDATES = 16
"""No question comes twice, so there is no data for more."""
TIMED, TIMED_UPDATES, REPEATS = ("sentiment", "both words", DPO), 4, 2
"""What `times` measures: updates of each run, of which the first does not count, and runs of each side."""


@dataclass(frozen=True, slots=True)
class Exact:
    """One update of both sides. `loss`, `gradient`, `step`: how far they are apart, the last two relative to TRL's.
    `logprob`: largest difference of a logprob between our sampler and TRL's trainer; None: nothing was sampled."""

    name: str
    loss: float
    gradient: float
    step: float
    logprob: float | None = None


def main() -> int:
    """Returns the exit code: 0 if the figures keep to their limits, 1 if one does not."""
    arguments = _arguments()
    record: dict[str, Any] = {"machine": machine.describe(), "exact": [], "cells": [], "times": []}
    if arguments.resume and arguments.out.exists():
        record |= json.loads(arguments.out.read_text())
    record["setting"] = asdict(Setting()) | {"updates": arguments.updates}
    study = Study(arguments, record)
    if EXACT in arguments.only:
        study.exact()
    for seed in arguments.seeds:
        for part in (part for part in arguments.only if part not in (EXACT, TIMES)):
            study.cells(part, seed)
    if TIMES in arguments.only:
        study.times()
    study.save()
    figures = list(_figures(record))
    report.show(figures)
    return int(any(figure.met is False for figure in figures))


class Study:
    """Fills the record with the results of parts."""

    def __init__(self, arguments: argparse.Namespace, record: dict[str, Any]) -> None:
        self._arguments, self.record = arguments, record
        self._bench = Bench(arguments.work, Setting(learning_rate=arguments.learning_rate))
        self._updates = arguments.updates

    def save(self) -> None:
        report.write(self._arguments.out, self.record, list(_figures(self.record)))
        if self._arguments.plot:
            plot(self.record, self._arguments.plot)

    # -- one update ------------------------------------------------------------------------------

    def exact(self) -> None:
        bench = self._bench
        self.record["logits_apart"] = bench.logits_apart()
        self.record["exact"] = []
        for task, losses in EXACT_LOSSES.items():
            rollouts = bench.sampled(task)
            for loss in losses:
                self._compare(f"{loss}, {task}", bench.step(loss, rollouts, TASKS[task].max_tokens, "none"))
        group = Setting().group
        scaled = bench.step("dapo", rollouts, TASKS[task].max_tokens, "group")
        self._compare(f"dapo, {task}, scaled rewards", scaled, ratio=math.sqrt(group / (group - 1)))
        for loss in PREFERENCES:
            self._compare(loss, bench.preference(loss, 0, 1, keeps_gradients=True))

    def _compare(self, name: str, order: Order, ratio: float = 1.0) -> None:
        """`ratio`: of our gradient to TRL's. It is not 1 where rewards are divided by their standard deviation, whose
        square is the sum of squares divided by n here, and by n - 1 in TRL."""
        (ours, mine), (theirs, other) = self._bench.run_both(order, self._arguments.together)
        found = Exact(
            name,
            abs(ours["updates"][0]["loss"] / ratio - theirs["updates"][0]["loss"]),
            gradients_apart(mine, other, ratio),
            adapters_apart(self._bench, Path(order.adapter), mine / ADAPTER, other / ADAPTER),
            _logprobs_apart(order, theirs["rows"]) if "rows" in theirs else None,
        )
        self.record["exact"].append(asdict(found))
        print(f"{name}: {found}", flush=True)
        self.save()

    # -- curves ----------------------------------------------------------------------------------

    def _order(self, part: str, seed: int, updates: int) -> Order:
        if part in PREFERENCES:
            return self._bench.preference(part, seed, min(updates, MOST_PREFERENCE_UPDATES))
        return self._bench.grpo(part, seed, updates, TASKS[part].max_tokens)

    def cells(self, part: str, seed: int) -> None:
        rate = self._bench.setting.learning_rate
        keys = ("side", "task", "seed", "learning_rate")
        done = {tuple(each[key] for key in keys) for each in self.record["cells"]}
        wanted = [side for side in self._arguments.sides if (side, part, seed, rate) not in done]
        order = self._order(part, seed, self._updates)
        results = self._bench.run_both(order, self._arguments.together, wanted)
        for side, (result, folder) in zip(wanted, results, strict=True):
            accuracy, margin = self._bench.held_out(folder / ADAPTER) if part in PREFERENCES else (None, None)
            found = (result["updates"], result["peak_mb"], result.get("tokens", 0), accuracy, margin)
            cell = Cell(side, part, seed, rate, *found)
            self.record["cells"].append(asdict(cell))
            _show(cell)
            self.save()

    # -- times -----------------------------------------------------------------------------------

    def times(self) -> None:
        """Seconds per update of both sides, which run in turns."""
        self.record["times"] = []
        for part in TIMED:
            order = self._order(part, 0, TIMED_UPDATES)
            for _ in range(REPEATS):
                for side in SIDES:
                    result, _ = self._bench.run(side, order)
                    ends = [update["seconds"] for update in result["updates"]]
                    seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
                    found = {"task": part, "side": side, "seconds": seconds, "peak_mb": result["peak_mb"]}
                    self.record["times"].append(found)
                    print(f"{part}, {side}: {seconds:.2f} s an update, {result['peak_mb']:.0f} MB", flush=True)
            self.save()


def _logprobs_apart(order: Order, rows: Sequence[dict[str, Any]]) -> float:
    """Largest difference of the logprob of a sampled token: our sampler's, and that of TRL's trainer."""
    ours = {(*each["prompt_ids"], -1, *each["completion_ids"]): each for each in order.given}
    apart = 0.0
    for row in rows:
        mine = ours[(*row["prompt_ids"], -1, *row["completion_ids"])]
        pairs = zip(mine["logprobs"], row["logprobs"], mine["mask"], strict=True)
        apart = max(apart, *(abs(one - other) for one, other, sampled in pairs if sampled))
    return apart


def _show(cell: Cell) -> None:
    last = cell.updates[-LAST:]
    if cell.accuracy is None:
        shown = f"reward {fmean(each['reward'] for each in last):.2f}"
    else:
        shown = f"loss {last[-1]['loss']:.3f}, held-out accuracy {cell.accuracy:.2f}, margin {cell.margin:.1f} nats"
    seconds = cell.updates[-1]["seconds"] / len(cell.updates)
    print(
        f"{cell.name}, seed {cell.seed}: {shown}; {seconds:.1f} s an update, {cell.processor_s:.1f} of the processor",
        flush=True,
    )


def _figures(record: dict[str, Any]) -> Iterator[Figure]:
    if "logits_apart" in record:
        yield _apart("logits apart", record["logits_apart"])
    for each in record["exact"]:
        yield _apart(f"{each['name']}, loss apart", each["loss"])
        yield _apart(f"{each['name']}, gradient apart, of its norm", each["gradient"])
    cells = [Cell(**each) for each in record["cells"]]
    for name in sorted({cell.name for cell in cells}):
        yield from _of_cells(name, [cell for cell in cells if cell.name == name])
    for part in TIMED:
        times = [[each["seconds"] for each in record["times"] if _of(each) == (part, side)] for side in SIDES]
        if all(times):
            for side, seconds in zip(SIDES, times, strict=True):
                yield Figure(f"{part}, {side}, time of an update", "s", *reported(seconds))
            ratio = ratios(*times)
            yield Figure(f"{part}, time of an update, of TRL's", "", ratio, ratio.median)


def _apart(name: str, value: float) -> Figure:
    return Figure(name, "millionths", *reported([1e6 * value]), limit=1e6 * APART)


def _of(timed: dict[str, Any]) -> tuple[str, str]:
    return timed["task"], timed["side"]


def _of_cells(name: str, cells: Sequence[Cell]) -> Iterator[Figure]:
    seeds = f"seeds: {len(cells)}"
    if cells[0].accuracy is None:
        for what, part in ((f"the last {LAST} updates", slice(-LAST, None)), ("all updates", slice(None))):
            means = [fmean(update["reward"] for update in cell.updates[part]) for cell in cells]
            yield Figure(f"{name}, reward of {what} ({seeds})", "", *reported(means))
    else:
        yield Figure(f"{name}, last loss ({seeds})", "", *reported([cell.updates[-1]["loss"] for cell in cells]))
        yield Figure(f"{name}, held-out accuracy", "", *reported([cell.accuracy or 0.0 for cell in cells]))
        yield Figure(f"{name}, held-out margin", "nats", *reported([cell.margin or 0.0 for cell in cells]))
    yield Figure(f"{name}, processor time of an update", "s", *reported([cell.processor_s for cell in cells]))
    yield Figure(f"{name}, peak memory", "MB", *reported([cell.peak_mb for cell in cells]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="none: shows the record again")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--sides", nargs="+", choices=(*SIDES, *CHANGED), default=SIDES)
    parser.add_argument("--learning-rate", type=float, default=Setting().learning_rate)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--resume", action="store_true", help="keep the cells of the record")
    parser.add_argument("--together", action="store_true", help="run both sides of a cell at the same time")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "beside_trl", help="working folder")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "beside_trl.json")
    parser.add_argument("--plot", type=Path, default=report.RESULTS / "beside_trl.png")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
