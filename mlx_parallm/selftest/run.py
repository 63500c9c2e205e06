"""Runs the self-test: every check with every model."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_parallm.selftest.check import Check, CheckResult
from mlx_parallm.selftest.checks import CHECKS
from mlx_parallm.selftest.models import ModelChoice, real_model, tiny_models
from mlx_parallm.selftest.report import ModelReport, SelfTestReport, describe_machine, served_as
from mlx_parallm.selftest.tested import TestedModel, opened
from mlx_parallm.selftest.timings import timings

_MOST_S = 300.0
"""A check that takes longer has failed: the engine, or the device, hangs."""

OnResult = Callable[[str, CheckResult], None]
"""Called with a model's name and each result, as soon as it is known."""


def run(
    path: str | None = None, only_tiny: bool = False, on_result: OnResult = lambda name, result: None
) -> SelfTestReport:
    """Tests this machine. It takes about a minute on two cores.

    Args:
        path: a model's folder or hub id, in place of the bundled model.
        only_tiny: test the tiny random models only, which takes seconds.

    Raises:
        ModelError, ConfigError: the model cannot be loaded, or cannot be trained.
    """
    models = asyncio.run(tested_models(None if only_tiny else real_model(path), on_result))
    return SelfTestReport(describe_machine(), models)


async def tested_models(real: ModelChoice | None, on_result: OnResult) -> tuple[ModelReport, ...]:
    """Tests the tiny models and the real one, if there is one. Raises what `run` raises."""
    reports = []
    with _errors_only(), tempfile.TemporaryDirectory(prefix="mlx_parallm-self-test-") as name:
        folder = Path(name)
        for number, choice in enumerate([*tiny_models(folder), *([real] if real else [])]):
            reports.append(await _of_model(choice, folder / f"run-{number}", on_result))
    return tuple(reports)


@contextmanager
def _errors_only() -> Iterator[None]:
    """Leaves out what the package logs below errors, because some checks cause warnings on purpose."""
    log = logging.getLogger("mlx_parallm")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


async def _of_model(choice: ModelChoice, folder: Path, on_result: OnResult) -> ModelReport:
    started = time.monotonic()
    async with opened(choice.name, choice.path, folder) as tested:
        results = await run_checks(tested, CHECKS, on_result)
        timed = await timings(tested) if choice.timed else ()
        return ModelReport(choice.name, served_as(tested), results, timed, time.monotonic() - started)


async def run_checks(
    tested: TestedModel, checks: Iterable[Check], on_result: OnResult = lambda name, result: None
) -> tuple[CheckResult, ...]:
    """Runs those of the checks that apply to the model. One that raises has failed, and the others still run."""
    results = []
    for check in checks:
        if check.applies(tested):
            result = await _result(tested, check)
            on_result(tested.name, result)
            results.append(result)
    return tuple(results)


async def _result(tested: TestedModel, check: Check) -> CheckResult:
    try:
        async with asyncio.timeout(_MOST_S):
            return CheckResult(check, await check.run(tested))
    except TimeoutError:
        return CheckResult(check, None, f"it did not end within {_MOST_S:g} s")
    except Exception as error:  # noqa: BLE001 - a broken device may raise anything, and the other checks tell more
        text = f"{type(error).__name__}: {error}"
        return CheckResult(check, None, text.replace(str(Path.home()), "~"))  # the report names nobody
