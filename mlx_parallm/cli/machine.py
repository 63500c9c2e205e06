"""The commands about this machine: version, and doctor with its self-test."""

from __future__ import annotations

import json
import platform
from argparse import Namespace
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm import __version__
from mlx_parallm.cli.parser import argument, takes
from mlx_parallm.cli.show import JSON, show, table
from mlx_parallm.config import human_bytes
from mlx_parallm.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from mlx_parallm.selftest.check import CheckResult
    from mlx_parallm.selftest.report import SelfTestReport
    from mlx_parallm.selftest.timings import Timing

_REPORT = Path("mlx_parallm-self-test.json")


@takes(JSON)
def version(args: Namespace) -> int:
    """Prints the versions of this package, MLX, mlx-lm and Python."""
    packages = {"mlx_parallm": __version__} | {name: metadata.version(name) for name in ("mlx", "mlx-lm")}
    system = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    lines = [f"{name} {number}" for name, number in packages.items()]
    return show(args, packages | system, "\n".join([*lines, f"python {system['python']} on {system['platform']}"]))


@takes(
    JSON,
    argument(
        "--self-test",
        action="store_true",
        help="Compare every path of the engine with a plain forward pass of mlx-lm on this machine, in some minutes.",
    ),
    argument(
        "--model-path",
        metavar="DIR_OR_HUB_ID",
        help="With --self-test: the model to test, in place of the bundled one.",
    ),
    argument(
        "--only-tiny", action="store_true", help="With --self-test: test tiny random models only, which takes seconds."
    ),
    argument(
        "--report",
        type=Path,
        metavar="FILE",
        help=f"With --self-test: the report to write, which can be attached to an issue. Default: {_REPORT}.",
    ),
)
def doctor(args: Namespace) -> int:
    """Prints a report about this machine. Warnings are part of the report and do not change the exit status; a check of
    the self-test that fails does."""
    if args.self_test:
        return _self_test(args)
    for flag, value in (("--model-path", args.model_path), ("--only-tiny", args.only_tiny), ("--report", args.report)):
        if value:
            raise ConfigError(f"{flag} belongs to --self-test: add that, or leave {flag} out")
    from mlx_parallm.cli.doctor import report

    found = report()
    return show(args, {**found.facts, "warnings": list(found.warnings)}, found.text)


def _self_test(args: Namespace) -> int:
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
    show(args, data, "\n".join(_ending(report, file)))
    return 0 if report.passed else 1


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
