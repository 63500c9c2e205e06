"""`mlx_parallm doctor --self-test`: its arguments, and what it prints."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.cli.table import show, table
from mlx_parallm.config import human_bytes
from mlx_parallm.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from mlx_parallm.selftest.check import CheckResult
    from mlx_parallm.selftest.report import SelfTestReport
    from mlx_parallm.selftest.timings import Timing

_REPORT = Path("mlx_parallm-self-test.json")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds --self-test and the flags that belong to it."""
    whole = "Compare every path of the engine with a plain forward pass of mlx-lm on this machine, in some minutes."
    parser.add_argument("--self-test", action="store_true", help=whole)
    model = "With --self-test: the model to test, in place of the bundled one."
    parser.add_argument("--model-path", metavar="DIR_OR_HUB_ID", help=model)
    tiny = "With --self-test: test tiny random models only, which takes seconds."
    parser.add_argument("--only-tiny", action="store_true", help=tiny)
    report = f"With --self-test: the report to write, which can be attached to an issue. Default: {_REPORT}."
    parser.add_argument("--report", type=Path, metavar="FILE", help=report)


def check_arguments(args: Namespace) -> None:
    """Raises ConfigError: a flag that belongs to --self-test is given without it."""
    for flag, value in (("--model-path", args.model_path), ("--only-tiny", args.only_tiny), ("--report", args.report)):
        if value and not args.self_test:
            raise ConfigError(f"{flag} belongs to --self-test: add that, or leave {flag} out")


def self_test(args: Namespace) -> int:
    """Runs the self-test, and writes its report. The exit status is 0 if all checks passed, else 1.

    Raises:
        ModelError, ConfigError: the model cannot be loaded, or cannot be trained.
        StorageError: the report cannot be written.
    """
    from mlx_parallm.selftest.run import run

    file = args.report or _REPORT
    report = run(args.model_path, args.only_tiny, show_nothing if args.json else show_result)
    data = report.as_json()
    try:
        file.write_text(json.dumps(data, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"--report: {file} cannot be written: {error.strerror}") from error
    show(args, data, lambda: "\n".join(_ending(report, file)))
    return 0 if report.passed else 1


# -- text ----------------------------------------------------------------------------------------


def show_nothing(*_: object) -> None:
    """With --json, only the report is printed."""


def show_result(model: str, result: CheckResult) -> None:
    """One line for a check that passed, and below one that failed what was compared and what to do."""
    outcome = result.outcome
    figures = "" if outcome is None else f"{outcome.difference:.1e}, limit {outcome.limit.value:.1e}"
    mark = "ok" if result.passed else "FAILED"
    print(f"{mark:<7} {model:<22} {result.check.name:<24} {figures}".rstrip(), flush=True)
    if not result.passed:
        limit = "" if outcome is None else f" Limit: {outcome.limit.source}."
        print(f"        {result.problem}. Compared: {result.check.compared}.{limit}\n        {result.check.advice}")


def _ending(report: SelfTestReport, file: Path) -> Iterator[str]:
    """The timings, the verdict, and where the report is."""
    for model in report.models:
        if model.timings:
            yield f"\ntimes of {model.name} ({model.served_as}) on {report.machine['device']}"
            yield table([_cells(timing) for timing in model.timings])
    results = [result for model in report.models for result in model.results]
    failed = sum(not result.passed for result in results)
    yield f"\n{failed} of {len(results)} checks failed" if failed else f"\nall {len(results)} checks passed"
    yield f"the report is in {file}; it has no paths and no names of yours, so you can attach it to an issue"


def _cells(timing: Timing) -> tuple[str, ...]:
    tokens = "" if timing.tokens_per_s is None else f"{timing.tokens_per_s:,.0f} tokens/s"
    rate = "" if timing.bytes_per_s is None else f"{human_bytes(int(timing.bytes_per_s))}/s"
    return timing.name, f"{1000 * timing.seconds:.1f} ms", tokens, rate
