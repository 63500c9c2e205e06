"""Runs the sections of the report, one after the other, within the time budget.

    self-test ─▶ memory ─▶ load ─▶ decode ─▶ prefill ─▶ update        the file is replaced before and after each of them

Each section gets its share of the time that is left. Ctrl-C and SIGTERM end the run; the file says so, and has what was
measured until then.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from mlx_parallm.bench.report import Report, Section, Status
from mlx_parallm.bench.sections import Sides, memory, self_test
from mlx_parallm.bench.sizes import ADAPTERS, RANK, ROWS, SCALE, SIZES, Sizes
from mlx_parallm.config import Config, LoRAConfig, configure
from mlx_parallm.model.bundled import bundled_path
from mlx_parallm.model.device import on_cpu
from mlx_parallm.selftest.models import ModelChoice, real_model
from mlx_parallm.selftest.report import describe_machine
from mlx_parallm.selftest.run import OnResult
from mlx_parallm.selftest.tested import started

_STOPPING_S = 12.0
"""Of the budget, for stopping the engine at the end."""

_MEASURED = {"decode": (0.62, Sides.decode), "prefill": (0.4, Sides.prefill), "update": (1.0, Sides.update)}
"""The sections that need the loaded model: their shares of the time that is left then, and what they do."""

OnSection = Callable[[Section], None]
"""Called when a section begins, and when it has ended."""


def run(
    path: str | None, sizes: str | None, budget_s: float, file: Path, on_section: OnSection, on_check: OnResult
) -> Report:
    """Measures this machine and writes the report.

    Args:
        path: a model's folder or hub id, in place of the bundled model.
        sizes: a name in `SIZES`; None: by the kind of the device.
        budget_s: the most seconds that it may take.
        file: the report's file.
        on_check: called with each result of the self-test.

    Raises:
        ModelNotFoundError: there is no such model, or the bundled one is not installed.
        ConfigError, StorageError: the file cannot be written.
    """
    if (choice := real_model(path)) is None:
        bundled_path()  # raises, and says how to install it
        raise AssertionError("the bundled model is installed, and was not found")
    name = sizes or ("cpu" if on_cpu() else "gpu")
    setting = {"sizes": name, **asdict(SIZES[name]), "rows": ROWS, "adapters": ADAPTERS, "rank": RANK}
    sections = [
        Section("self-test", 0.3),
        Section("memory", 0.3),
        Section("load", 1.0),
        *(Section(name, share) for name, (share, _) in _MEASURED.items()),
    ]
    report = Report(file, describe_machine(), {"name": choice.name}, setting, budget_s, sections)
    report.write()
    asyncio.run(_interruptible(_Run(report, choice, SIZES[name], on_section, on_check)))
    report.write()
    return report


class _Run:
    """The sections of one report."""

    def __init__(
        self, report: Report, choice: ModelChoice, sizes: Sizes, on_section: OnSection, on_check: OnResult
    ) -> None:
        self.report = report
        self._choice, self._sizes = choice, sizes
        self._on_section, self._on_check = on_section, on_check
        self._sides: Sides | None = None

    async def all(self) -> None:
        """Runs the sections. Those that need the model are not begun if it was not loaded."""
        tested, steps, load, *measured = self.report.sections
        real = None if self._sizes.only_tiny else replace(self._choice, timed=False)
        await self._section(tested, lambda _: self_test(tested, real, self._on_check))
        await self._section(steps, lambda _: memory(steps, self._choice.path))
        async with AsyncExitStack() as stack:
            await self._section(load, lambda _: self._load(stack))
            if (sides := self._sides) is None:
                return
            for section in measured:
                _, measure = _MEASURED[section.name]
                await self._section(section, partial(measure, sides, section))

    async def _section(self, section: Section, work: Callable[[float], Awaitable[None]]) -> None:
        section.status = Status.RUNNING
        section.limit_s = max(0.0, section.share * (self.report.left_s - _STOPPING_S))
        self.report.write()
        self._on_section(section)
        try:
            await section.run(work(time.monotonic() + section.limit_s))
        finally:
            self.report.write()
            self._on_section(section)

    async def _load(self, stack: AsyncExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlx_parallm-bench-"))
        engine, served = await stack.enter_async_context(started(_config(self._choice.path, folder)))
        card = served.card
        self.report.model |= {
            "parameters": card.parameters,
            "weight_bytes": card.weight_bytes,
            "dtype": card.dtype,
            "quantization": card.quantization,
            "loaded_in_s": engine.load_seconds,
        }
        self._sides = await Sides.of(engine, served, self._choice.path, self._sizes)


def _config(path: str | None, folder: str) -> Config:
    """A server's own settings, with room for the rows and adapters."""
    keys = {
        "adapters__max_loras": ADAPTERS,
        "adapters__max_lora_rank": RANK,
        "checkpointing__checkpoint_dir": folder,
        "rl_training__loss__kl_coef": 0.0,  # the plain trainer has no reference model
    }
    return configure(path, LoRAConfig(RANK, SCALE * RANK), None, **keys)


async def _interruptible(running: _Run) -> None:
    """Runs until the end, or until a signal."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def interrupt(number: signal.Signals) -> None:
        running.report.interrupted = number.name
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    try:
        await running.all()
    except asyncio.CancelledError:
        if not running.report.interrupted:
            raise
