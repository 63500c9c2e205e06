"""The budget of one decode step: where its time goes here, and what it launches and reads on a Mac.

    python benchmarks/step.py [--only times counts operations budget training compared] [--quick]
        [--models bundled 1b 8b hybrid] [--rows 1 8 16 32] [--contexts 64 512 1024] [--repeats 7] [--out FILE]
    python benchmarks/step.py --record-counts
    python benchmarks/step.py --beside FILE

times: the bundled model on this machine, by part. About 2 minutes; nothing else should run meanwhile.
counts: kernels launched and bytes moved, counted from the graphs that our code builds for a Mac's GPU. Seconds, on any
    machine, always the same. They are compared with the record, results/step_counts.json.
operations: which operations launch and move most, in a step of 16 rows of Llama-3.1-8B.
budget: the time of a step of Llama-3.1-8B in 4 bits on an M4 Max, as arithmetic over these counts.
training: kernels, nodes of the graph, products and waits of a training micro-step beside one of a plain trainer of
    mlx-lm, eager and under mx.compile, of the bundled model with rank 16. Seconds; its record is that of the counts.
compared: a whole step of the engine beside one of mlx-lm's batch generator: kernels, nodes of the graph, waits, copies,
    traffic, and the time of the host, a step of each in turn; with plain attention, and in the kernel. For 1 to 32 rows
    of 500 and 4,000 tokens of four models without weights, whose layers and widths are the true ones. About 5 minutes,
    and its record is results/step_compared.json. --quick: 1 and 16 rows of 500 tokens, without a record.

--beside FILE: the decode steps of a report of `mlx_parallm bench --report`, of a GPU, beside what the arithmetic gives
with the rates that the report has measured. It fails if one is off by more than 20 %: then the arithmetic is wrong.

--record-counts writes the counts to the record and does nothing else. Tests fail if a step launches or moves more than
2 % more than the record says; the commit that records more says why.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.step import cases, compared
from benchmarks.lib.step.budget import Budget, Rates, budget
from benchmarks.lib.step.cases import Case
from benchmarks.lib.step.counting import Counts
from benchmarks.lib.step.decode import Rows
from benchmarks.lib.step.engines import Batch
from benchmarks.lib.step.models import LLAMA_8B, Architecture, parameters
from benchmarks.lib.step.timing import Timer, Times
from benchmarks.lib.step.training import COMPILED, OURS, TOGETHER

RECORD = report.RESULTS / "step.json"
COMPARED = RECORD.with_name("step_compared.json")
PARTS = ("times", "counts", "operations", "budget", "training", "compared")
COMPARED_REPEATS = 15
MOST_MICRO_STEP_KERNELS, MOST_MICRO_STEP_WAITS = 1.6, 10
"""Times those of the compiled plain trainer; if no request waits."""
AIMS = {"kernels": (1.2, 1.6), "nodes": (1.4, None), "host": (1.8, 2.4)}
"""At most so many times mlx-lm's, with 16 rows of 500 tokens; with eight adapters."""
AIMS_OF_KERNEL = {"kernels": (1.05, 1.45)}
"""The same where rows attend in the kernel of `paged_attention`."""
MOST_OFF = 0.2
MOST_TRAFFIC = 1.3
"""Times mlx-lm's, with 16 rows of 4,000 tokens that attend in the kernel."""
AIMED = [Batch(16, 500, adapters, kernel=kernel) for adapters in (0, 8) for kernel in (False, True)]
LONG = Batch(16, 4000, kernel=True)
BUDGET_ROWS = (1, 8, 16, 32, 64)
BUDGET_CONTEXTS = (512, 2000)
SHOWN_OPERATIONS = 24
_SHORT = {"keys_and_values": "KV", "nbytes": "all MB"}


def main() -> int:
    """Returns the exit code: 1 if a step launches or moves more than the record allows."""
    arguments = _arguments()
    if arguments.record_counts:
        cases.write_record(cases.as_record(cases.counted(cases.cases())) | cases.whole_steps() | cases.micro_steps())
        print(f"written to {cases.RECORD}")
        return 0
    if arguments.beside:
        return _beside(json.loads(arguments.beside.read_text()))
    figures: list[Figure] = []
    tables: list[Table] = []
    record: dict[str, Any] = {"machine": machine.describe(), "setting": _setting(arguments)}
    more: list[str] = []
    if "counts" in arguments.only:
        found = cases.counted(cases.cases())
        tables.append(_counts_table(found))
        more += cases.excess(cases.as_record(found), cases.read_record(""))
    if "training" in arguments.only:
        micro_steps = cases.micro_steps()
        tables.append(_micro_steps_table(micro_steps))
        record["micro_steps"] = micro_steps
        figures += _micro_step_figures(micro_steps)
        more += cases.excess(micro_steps, cases.read_record("training"))
    if "operations" in arguments.only:
        tables.append(_operations_table(Case(LLAMA_8B, Rows.of([512] * 16))))
    if "budget" in arguments.only:
        budgets = _budgets()
        tables.append(_budget_table(budgets))
        record["budget_ms"] = {case.name: asdict(item) for case, item in budgets.items()}
        figures += [_figure(f"M4 Max, arithmetic: {case.name}", item.total) for case, item in budgets.items()]
    if "times" in arguments.only:
        times = _times(arguments)
        tables.append(_times_table(times))
        record["times_ms"] = {rows.text: asdict(item) for rows, item in times.items()}
        figures += [_figure(f"step, {rows.text}", item.step) for rows, item in times.items()]
    if figures or tables:
        report.show(figures, *tables)
    out = RECORD if len(arguments.only) == len(PARTS) else None
    if out:
        report.write(out, record, figures)
        print(f"written to {out}")
    if "compared" in arguments.only:
        _compare(arguments)
    print(*more, sep="\n")
    return int(bool(more))


def _times(arguments: argparse.Namespace) -> dict[Rows, Times]:
    machine.warn_if_busy()
    wanted = [Rows.of([context] * rows) for rows in arguments.rows for context in arguments.contexts]
    most, middle = max(arguments.rows), sorted(arguments.contexts)[len(arguments.contexts) // 2]
    wanted += [Rows.of([middle] * most, sampled=True), Rows.of([middle] * most, adapters=8)]
    timer = Timer()
    found = {}
    for rows in wanted:
        found[rows] = timer.measure(rows, arguments.repeats)
        print(f"  {rows.text}: {found[rows].step:.1f} ms", flush=True)
    return found


def _budgets() -> dict[Case, Budget]:
    wanted = [Case(LLAMA_8B, Rows.of([context] * rows)) for context in BUDGET_CONTEXTS for rows in BUDGET_ROWS]
    return {case: budget(counts, len(case.rows.contexts)) for case, counts in cases.counted(wanted).items()}


def _beside(measured: Mapping[str, Any]) -> int:
    """The base model's steps of a report. Returns 1 if the arithmetic is off."""
    architecture = next(
        (each for each in compared.MODELS.values() if parameters(each) == measured["model"].get("parameters")), None
    )
    if architecture is None:
        print(f"no counts for this model; there are some for {', '.join(compared.MODELS)}")
        return 2
    rates, context = Rates.of_report(measured), measured["setting"]["context"]
    steps = {
        rows: 1e3 * rows / figure["ours"]
        for rows in measured["setting"]["rows"]
        for figure in measured["sections"]["decode"]["figures"]
        if figure["name"] == f"{rows} {'row' if rows == 1 else 'rows'}, base" and figure["ours"]
    }
    found = cases.counted(Case(architecture, Rows.of([context] * rows)) for rows in steps)
    expected = [budget(counts, rows, rates).total for rows, counts in zip(steps, found.values(), strict=True)]
    figures = [
        Figure(f"{rows} rows: arithmetic over measured ({predicted:.1f} / {taken:.1f} ms)", "x", *reported([ratio]))
        for (rows, taken), predicted in zip(steps.items(), expected, strict=True)
        for ratio in [predicted / taken]
    ]
    report.show(figures)
    return int(any(abs(figure.judged - 1) > MOST_OFF for figure in figures))


def _compare(arguments: argparse.Namespace) -> None:
    machine.warn_if_busy()
    record: dict[str, Any] = {"machine": machine.describe(), "setting": _setting(arguments), "steps": {}}
    tables, figures = [], []
    for name in arguments.models:
        table, rows, found = _compared(compared.MODELS[name], list(compared.batches(arguments.quick)))
        tables.append(table)
        figures += found
        record["steps"] |= rows
    report.show(figures, *tables)
    out = arguments.out or (None if arguments.quick else COMPARED)
    if out:
        report.write(out, record, figures)
        print(f"written to {out}")


def _compared(model: Architecture, batches: list[Batch]) -> tuple[Table, dict[str, Any], list[Figure]]:
    columns = ("kernels", "nodes", "host ms", "traffic", "waits", "copies")
    table = _table(f"A whole step beside mlx-lm's: {model.name}", columns)
    counts, times = compared.counted(model, batches), compared.timed(model, batches, COMPARED_REPEATS)
    rows, figures = {}, []
    for batch, found in counts.items():
        host = times[batch]
        pair = [f"{getattr(found.ours, what):,} / {getattr(found.theirs, what):,}" for what in ("waits", "copies")]
        table.add_row(
            batch.text,
            *(f"{getattr(found.ours, what):,}, {found.ratio(what):.2f}x" for what in ("kernels", "nodes")),
            f"{host.ours:.1f}, {host.ratio.text(2)}x",
            f"{found.ours.traffic / 1e6:,.0f} MB, {found.ratio('traffic'):.2f}x",
            *pair,
        )
        rows[f"{model.name}, {batch.text}"] = {**asdict(found), "host": asdict(host)}
        if batch in AIMED:
            spreads = {what: reported([found.ratio(what)])[0] for what in ("kernels", "nodes")} | {"host": host.ratio}
            aims = AIMS | (AIMS_OF_KERNEL if batch.kernel else {})
            figures += [
                Figure(
                    f"{model.name}, {batch.text}: {what}", "x", spread, spread.median, aims[what][batch.adapters > 0]
                )
                for what, spread in spreads.items()
            ]
        if batch == LONG:
            traffic = reported([found.ratio("traffic")])
            figures.append(Figure(f"{model.name}, {batch.text}: traffic beside K and V", "x", *traffic, MOST_TRAFFIC))
    return table, rows, figures


def _figure(name: str, milliseconds: float) -> Figure:
    return Figure(name, "ms", *reported([milliseconds]))


def _setting(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name not in ("out", "beside", "record_counts")}


# -- tables --------------------------------------------------------------------------------------


def _times_table(times: Mapping[Rows, Times]) -> Table:
    names = [field.name for field in fields(Times)]
    table = _table("Time of a step here, ms", names)
    for rows, item in times.items():
        table.add_row(rows.text, *(f"{getattr(item, name):.1f}" for name in names))
    return table


def _budget_table(budgets: Mapping[Case, Budget]) -> Table:
    names = [field.name for field in fields(Budget)] + ["total"]
    table = _table(f"{LLAMA_8B.name} on an M4 Max, ms by arithmetic", names)
    for case, item in budgets.items():
        table.add_row(case.rows.text, *(f"{getattr(item, name):.1f}" for name in names))
    return table


def _counts_table(found: Mapping[Case, Counts]) -> Table:
    launches = ("launches", "repeated")
    sizes = ("nbytes", "weights", "keys_and_values", "head", "adapters", "sampling", "activations")
    table = _table("Kernels launched, and MB read and written", (*launches, *sizes))
    for case, counts in found.items():
        numbers = [f"{getattr(counts, name):,}" for name in launches]
        table.add_row(case.name, *numbers, *(f"{getattr(counts, name) / 1e6:,.1f}" for name in sizes))
    return table


def _micro_steps_table(found: Mapping[str, Mapping[str, int]]) -> Table:
    compiled = found[f"training: {COMPILED}"]
    table = _table("A training micro-step, and its multiples of the compiled plain trainer", list(compiled))
    for name, counts in found.items():
        table.add_row(name, *(f"{value:,}, {value / compiled[what]:.2f}x" for what, value in counts.items()))
    return table


def _micro_step_figures(found: Mapping[str, Mapping[str, int]]) -> Iterator[Figure]:
    compiled = found[f"training: {COMPILED}"]
    for name in (f"training: {OURS}", f"training: {TOGETHER}"):
        kernels, waits = found[name]["kernels"] / compiled["kernels"], found[name]["waits"]
        yield Figure(f"{name}: kernels", "x", *reported([kernels]), MOST_MICRO_STEP_KERNELS)
        yield Figure(f"{name}: waits", "", *reported([waits]), MOST_MICRO_STEP_WAITS)


def _operations_table(case: Case) -> Table:
    table = _table(f"Operations that move most: {case.name}", ("launches", "nbytes"))
    for text, cost in list(cases.by_operation(case).items())[:SHOWN_OPERATIONS]:
        table.add_row(text, f"{cost.launches:,}", f"{cost.nbytes / 1e6:,.1f}")
    return table


def _table(title: str, names: Iterable[str]) -> Table:
    table = Table("step", title=title)
    for name in names:
        table.add_column(_SHORT.get(name, name.replace("_", " ")), justify="right")
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 512, 1024])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--models", nargs="+", choices=compared.MODELS, default=list(compared.MODELS))
    parser.add_argument("--quick", action="store_true", help="compare only 1 and 16 rows of 500 tokens")
    parser.add_argument("--record-counts", action="store_true", help="write the counts to the record, and stop")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="a report of this machine or another one")
    parser.add_argument("--out", type=Path, help=f"of `compared`; by default {COMPARED.name}, with --quick no file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
