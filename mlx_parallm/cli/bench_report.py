"""`mlx_parallm bench --report FILE`: its arguments, and what it prints."""

from __future__ import annotations

import signal
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_parallm.cli.parser import at_least
from mlx_parallm.cli.self_test import show_nothing, show_result
from mlx_parallm.cli.table import show, table
from mlx_parallm.errors import ConfigError

if TYPE_CHECKING:
    from mlx_parallm.bench.report import ReportSection

_COLUMNS = ("tokens/s, medians", "this engine", "mlx-lm", "ratio", "lowest to highest")
_MINUTES = 8


def add_arguments(parser: ArgumentParser) -> None:
    """Adds --report and the flags that belong to it."""
    group = parser.add_argument_group(
        "without a server",
        "Test and measure this machine in this process, beside mlx-lm, and write one JSON file. The flags above do not "
        "apply, except --json.",
    )
    group.add_argument("--report", type=Path, metavar="FILE", help="The file to write; one that exists is replaced.")
    model = "With --report: the model to measure, in place of the bundled one. Two copies of it must fit."
    group.add_argument("--model-path", metavar="DIR_OR_HUB_ID", help=model)
    sizes = "With --report: how much is measured. Default: by the device."
    group.add_argument("--sizes", choices=("gpu", "cpu", "tiny"), help=sizes)
    minutes = f"With --report: the most minutes that it takes; what does not fit is left out. Default: {_MINUTES}."
    group.add_argument("--minutes", type=at_least(1), metavar="N", help=minutes)


def check_arguments(args: Namespace) -> None:
    """Refuses flags that have no effect. `args.of_a_server`: the defaults of those that belong to the measurement of a
    server.

    Raises:
        ConfigError: such a flag is given with --report, or one that belongs to --report without it.
    """
    if args.report is None:
        for name in ("model_path", "sizes", "minutes"):
            if getattr(args, name) is not None:
                raise ConfigError(f"{_flag(name)} belongs to --report FILE: add that, or leave {_flag(name)} out")
        return
    for name, default in args.of_a_server.items():
        if getattr(args, name) != default:
            hint = "; to choose the model, pass --model-path" if name == "model" else ""
            raise ConfigError(f"--report measures this machine without a server: leave out {_flag(name)}{hint}")


def _flag(name: str) -> str:
    return "--no-ignore-eos" if name == "ignore_eos" else "--" + name.replace("_", "-")


def bench_report(args: Namespace) -> int:
    """Measures this machine and writes the report. The exit status is 0, 1 if a section failed, or as a shell has it
    after the signal that ended the run: 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        ModelNotFoundError, ConfigError, StorageError: see `bench.run.run`.
    """
    from mlx_parallm.bench.run import run

    shown = (show_nothing, show_nothing) if args.json else (_show_section, show_result)
    report = run(args.model_path, args.sizes, 60.0 * (args.minutes or _MINUTES), args.report, *shown)
    ended = f"interrupted by {report.interrupted}; " if report.interrupted else ""
    text = f"\n{ended}the report is in {args.report}; it has no paths and no names of yours"
    show(args, report.as_json(), lambda: text)
    if report.interrupted:
        return 128 + signal.Signals[report.interrupted]
    return 0 if report.passed else 1


# -- text ----------------------------------------------------------------------------------------


def _show_section(section: ReportSection) -> None:
    """When it begins, its name and limit; when it has ended, its figures."""
    from mlx_parallm.bench.report import Status

    if section.status is Status.RUNNING:
        print(f"\n{section.name}, at most {section.limit_s:.0f} s", flush=True)
        return
    print("\n".join(_ended(section)), flush=True)


def _ended(section: ReportSection) -> Iterator[str]:
    if section.figures:
        yield table([_COLUMNS, *(_cells(figure.as_json()) for figure in section.figures)])
    if section.memory:
        ahead, apart = (f"{section.memory[name] / 2**20:.1f} MiB" for name in ("ahead", "apart"))
        yield f"a step takes {ahead} besides what is held, {apart} without lookahead"
    if section.problem:
        yield section.problem
    missing = (
        f"; {len(section.cut)} of {len(section.figures)} figures lack rounds, see `cut` in the file"
        if section.cut
        else ""
    )
    yield f"{section.status.value} after {section.seconds:.0f} s{missing}"


def _cells(figure: dict[str, Any]) -> tuple[str, ...]:
    ratio = figure["ratio"]
    if ratio is None:
        return (figure["name"], "-", "-", "-", "-")
    rates = (f"{figure[side]:,.0f}" for side in ("ours", "mlx_lm"))
    return (figure["name"], *rates, f"{ratio['median']:.2f}", f"{ratio['low']:.2f} to {ratio['high']:.2f}")
