"""Runs the sections of the report, one after the other, within the time budget.

    self-test   every path of the engine beside mlx-lm's own forward pass
    memory      of steps
    device      reads, launches, products and attention, without a model
    load        of the model
    decode, prefill     beside mlx-lm's batch generator
    adapters    eight in a batch, beside one
    update      beside a plain trainer
    live        decode steps while the engine trains, beside those while it does not

The file is replaced before and after each of them, and has the state of the machine at its end.

Each section gets its share of the time that is left. Ctrl-C and SIGTERM end the run; the file says so, and has what was
measured until then.
"""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.app.build import RunningEngine, Served
from mlx_parallm.bench.comparison import Comparison, compare
from mlx_parallm.bench.device import device_facts, state
from mlx_parallm.bench.mlx_lm import MlxLm
from mlx_parallm.bench.ours import Ours
from mlx_parallm.bench.report import BenchReport, ReportSection, Status
from mlx_parallm.bench.sizes import ADAPTERS, CLIENTS, MIXED_ROWS, RANK, ROWS, SCALE, SIZES, Sizes
from mlx_parallm.config import Config, LoRAConfig, configure
from mlx_parallm.core.requests import SamplingParams
from mlx_parallm.model.bundled import bundled_path
from mlx_parallm.model.device import on_cpu
from mlx_parallm.selftest.check import CheckResult
from mlx_parallm.selftest.inputs import random_adapter, random_tokens
from mlx_parallm.selftest.models import ModelChoice, real_model
from mlx_parallm.selftest.report import describe_machine
from mlx_parallm.selftest.run import OnResult, tested_models
from mlx_parallm.selftest.step_memory import step_memory
from mlx_parallm.selftest.tested import started
from mlx_parallm.train.data import Datum, answered

_GREEDY = SamplingParams(temperature=0.0)
_TOP_P = SamplingParams(temperature=1.0, top_p=0.9)
_TOP_P_ROWS = (1, 16)
_ADAPTERS = {0: "base", 1: "one adapter", ADAPTERS: f"{ADAPTERS} adapters"}
_BESIDE = {
    0: "the same model in its batch generator",
    1: "the same adapter in its own LoRA layers",
    ADAPTERS: "the base model: it has no batches of several adapters",
}
_CACHED = 1000
"""Tokens that the KV pool holds while the memory of steps is measured."""
_BESIDE_UPDATE = "a plain trainer: its own LoRA layers, padded rows, AdamW; all activations are kept"


async def self_test(section: ReportSection, choice: ModelChoice | None, on_result: OnResult) -> None:
    """Every check of the self-test: rows in a batch and alone, mixed adapters, the prefix cache, gradients and so on.
    `choice`: the model to test beside the tiny ones.

    Raises:
        ModelError, ConfigError: the model cannot be loaded, or cannot be trained.
    """

    def keep(model: str, result: CheckResult) -> None:
        section.checks.append({"model": model, **result.as_json()})
        on_result(model, result)

    await tested_models(choice, keep)


async def memory(section: ReportSection, path: str | None) -> None:
    """The memory of steps with lookahead (`ahead`) and without (`apart`), while the KV pool holds a long prefix.

    Raises:
        ModelError, ConfigError: the model cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="mlx_parallm-bench-") as folder:
        section.facts = asdict(await step_memory(path, _CACHED, Path(folder)))


async def device(section: ReportSection) -> None:
    """See `device_facts`. It takes a few seconds, and is not interrupted."""
    section.facts = device_facts()


class Sides:
    """This engine and mlx-lm with one model, and what both are asked. Each round of a figure has prompts of its own."""

    def __init__(
        self, engine: RunningEngine, ours: Ours, mlx_lm: MlxLm, weights: AdapterWeights, vocabulary: int, sizes: Sizes
    ) -> None:
        self._run, self._ours, self._mlx_lm = engine.processor.run, ours, mlx_lm
        self._weights, self._vocabulary, self._sizes = weights, vocabulary, sizes

    @classmethod
    async def of(cls, engine: RunningEngine, served: Served, path: str | None, sizes: Sizes) -> Sides:
        """Loads the model for mlx-lm too, and publishes the adapters."""
        ours = Ours(engine, served)
        weights = random_adapter(ours.trainer.model.layout, seed=0, rank=RANK, everywhere=True)
        await ours.publish(weights)
        dtype = getattr(mx, served.card.dtype)
        mlx_lm = await engine.processor.run(lambda: MlxLm(path, weights, dtype))
        return cls(engine, ours, mlx_lm, weights, served.card.vocab_size, sizes)

    async def decode(self, section: ReportSection, until: float) -> None:
        """Decode steps of several numbers of rows: greedy with the base model, one adapter and eight; and sampled."""
        section.figures += [
            *(self._decode(rows, adapters, _GREEDY) for rows in ROWS for adapters in _ADAPTERS if adapters <= rows),
            *(self._decode(rows, 0, _TOP_P) for rows in _TOP_P_ROWS),
        ]
        await compare(section.figures, until)

    async def prefill(self, section: ReportSection, until: float) -> None:
        """Single prompts of several lengths, of the base model and of an adapter."""
        section.figures += [self._prefill(length, adapters) for length in self._sizes.prompts for adapters in (0, 1)]
        await compare(section.figures, until)

    async def adapters(self, section: ReportSection, until: float) -> None:
        """Decode steps of batches whose rows have eight adapters in turn, beside the same rows with one."""
        section.figures += [self._mixed(rows) for rows in MIXED_ROWS]
        await compare(section.figures, until)

    async def live(self, section: ReportSection, until: float) -> None:
        """Decode steps of several rows while updates follow one another, beside those of the same rows alone."""
        sizes = self._sizes

        async def alone(number: int) -> float:
            return await self._decoded(CLIENTS, ADAPTERS, number)

        async def training(number: int) -> float:
            updates = asyncio.create_task(self._updates(number))
            try:
                rate = await alone(number)
            finally:
                updates.cancel()
                await asyncio.wait([updates])
            if not updates.cancelled():  # it failed, and the rows decoded alone
                updates.result()
            return rate

        name = f"{CLIENTS} rows, {ADAPTERS} adapters, while it trains"
        section.figures.append(Comparison(name, "the same rows while it does not train", sizes.rounds, training, alone))
        await compare(section.figures, until)

    async def _updates(self, number: int) -> None:
        for update in count(number * 1000):
            await self._ours.update(self._samples(update), self._weights)

    async def update(self, section: ReportSection, until: float) -> None:
        """An update of an adapter: micro-steps and AdamW."""
        sizes = self._sizes
        samples = sizes.groups * sizes.group
        trained = samples * sizes.answer
        name = f"{samples} samples of {sizes.question} + {sizes.answer} tokens, trained tokens"

        async def ours(number: int) -> float:
            return trained / await self._ours.update(self._samples(number), self._weights)

        async def theirs(number: int) -> float:
            batch = self._samples(number)
            return trained / await self._run(lambda: self._mlx_lm.update(batch, rows=sizes.group))

        section.figures.append(Comparison(name, _BESIDE_UPDATE, sizes.rounds, ours, theirs))
        await compare(section.figures, until)

    # -- one figure ------------------------------------------------------------------------------

    def _decode(self, rows: int, adapters: int, sampling: SamplingParams) -> Comparison:
        sizes = self._sizes
        limits: tuple[Any, ...] = (sampling, adapters, sizes.steps, sizes.seconds)

        async def ours(number: int) -> float:
            return await self._ours.decode(self._prompts(rows, sizes.context, number), *limits)

        async def theirs(number: int) -> float:
            prompts = self._prompts(rows, sizes.context, number)
            return await self._run(lambda: self._mlx_lm.decode(prompts, *limits))

        name = f"{rows} {'row' if rows == 1 else 'rows'}, {_ADAPTERS[adapters]}"
        sampled = "" if sampling is _GREEDY else f", top-p {sampling.top_p:g}"
        return Comparison(name + sampled, _BESIDE[adapters], sizes.rounds, ours, theirs)

    def _mixed(self, rows: int) -> Comparison:
        async def mixed(number: int) -> float:
            return await self._decoded(rows, ADAPTERS, number)

        async def one(number: int) -> float:
            return await self._decoded(rows, 1, number)

        name = f"{rows} {'row' if rows == 1 else 'rows'}, {_ADAPTERS[ADAPTERS]} in turn"
        return Comparison(name, "the same rows with one adapter", self._sizes.rounds, mixed, one)

    async def _decoded(self, rows: int, adapters: int, number: int) -> float:
        sizes = self._sizes
        prompts = self._prompts(rows, sizes.context, number)
        return await self._ours.decode(prompts, _GREEDY, adapters, sizes.steps, sizes.seconds)

    def _prefill(self, length: int, adapters: int) -> Comparison:
        async def ours(number: int) -> float:
            return await self._ours.prefill(self._prompts(1, length, number)[0], _GREEDY, adapters)

        async def theirs(number: int) -> float:
            (prompt,) = self._prompts(1, length, number)
            return await self._run(lambda: self._mlx_lm.prefill(prompt, _GREEDY, adapters))

        name = f"prompt of {length} tokens, {_ADAPTERS[adapters]}"
        return Comparison(name, _BESIDE[adapters], self._sizes.rounds, ours, theirs)

    def _prompts(self, rows: int, length: int, number: int) -> list[list[int]]:
        return [random_tokens(self._vocabulary, length, seed=1000 * number + row) for row in range(rows)]

    def _samples(self, number: int) -> tuple[Datum, ...]:
        """Groups of answers, each with one prompt and advantages of both signs."""
        sizes, chance = self._sizes, random.Random(number)

        def tokens(count: int) -> Sequence[int]:
            return [chance.randrange(self._vocabulary) for _ in range(count)]

        prompts = [tokens(sizes.question) for _ in range(sizes.groups)]
        return tuple(
            answered(prompt, tokens(sizes.answer), advantage=1.0 if at % 2 else -1.0, group=group)
            for group, prompt in enumerate(prompts)
            for at in range(sizes.group)
        )


_STOPPING_S = 12.0
"""Of the budget, for stopping the engine at the end."""

_MEASURED = {
    "decode": (0.45, Sides.decode),
    "prefill": (0.3, Sides.prefill),
    "adapters": (0.35, Sides.adapters),
    "update": (0.5, Sides.update),
    "live": (1.0, Sides.live),
}
"""The sections that need the loaded model: their shares of the time that is left then, and what they do."""

OnSection = Callable[[ReportSection], None]
"""Called when a section begins, and when it has ended."""


def run(
    path: str | None, sizes: str | None, budget_s: float, file: Path, on_section: OnSection, on_check: OnResult
) -> BenchReport:
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
        ReportSection("self-test", 0.3),
        ReportSection("memory", 0.2),
        ReportSection("device", 0.2),
        ReportSection("load", 1.0),
        *(ReportSection(name, share) for name, (share, _) in _MEASURED.items()),
    ]
    local = Path(choice.path) if choice.path is not None and Path(choice.path).is_dir() else None
    report = BenchReport(file, describe_machine(), {"name": choice.name}, setting, budget_s, sections, folder=local)
    report.write()
    asyncio.run(_interruptible(_Run(report, choice, SIZES[name], on_section, on_check)))
    report.write()
    return report


class _Run:
    """The sections of one report."""

    def __init__(
        self, report: BenchReport, choice: ModelChoice, sizes: Sizes, on_section: OnSection, on_check: OnResult
    ) -> None:
        self.report = report
        self._choice, self._sizes = choice, sizes
        self._on_section, self._on_check = on_section, on_check
        self._sides: Sides | None = None

    async def all(self) -> None:
        """Runs the sections. Those that need the model are not begun if it was not loaded."""
        tested, steps, alone, load, *measured = self.report.sections
        real = None if self._sizes.only_tiny else replace(self._choice, timed=False)
        await self._section(tested, lambda _: self_test(tested, real, self._on_check))
        await self._section(steps, lambda _: memory(steps, self._choice.path))
        await self._section(alone, lambda _: device(alone))
        async with AsyncExitStack() as stack:
            await self._section(load, lambda _: self._load(stack))
            if (sides := self._sides) is None:
                return
            for section in measured:
                _, measure = _MEASURED[section.name]
                await self._section(section, partial(measure, sides, section))

    async def _section(self, section: ReportSection, work: Callable[[float], Awaitable[None]]) -> None:
        section.status = Status.RUNNING
        section.limit_s = max(0.0, section.share * (self.report.left_s - _STOPPING_S))
        self.report.write()
        self._on_section(section)
        try:
            await section.run(work(time.monotonic() + section.limit_s))
            if self.report.interrupted:  # what was cancelled ended with an error, which hides the cancellation
                section.status = Status.INTERRUPTED
                raise asyncio.CancelledError
        finally:
            section.state = state()
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
