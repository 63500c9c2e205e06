"""What is measured: the self-test, the memory of steps, decode and prefill beside mlx-lm, and an update beside a plain
trainer."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.app.build import Engine, Served
from mlx_parallm.bench.comparison import Comparison, compare
from mlx_parallm.bench.mlx_lm import MlxLm
from mlx_parallm.bench.ours import Ours
from mlx_parallm.bench.report import Section
from mlx_parallm.bench.sizes import ADAPTERS, RANK, ROWS, Sizes
from mlx_parallm.core import SamplingParams
from mlx_parallm.rl.objectives.samples import Sample, answered
from mlx_parallm.selftest.check import CheckResult
from mlx_parallm.selftest.inputs import random_adapter, random_tokens
from mlx_parallm.selftest.models import ModelChoice
from mlx_parallm.selftest.run import OnResult, tested_models
from mlx_parallm.selftest.step_memory import step_memory

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


async def self_test(section: Section, choice: ModelChoice | None, on_result: OnResult) -> None:
    """Every check of the self-test: rows in a batch and alone, mixed adapters, the prefix cache, gradients and so on.
    `choice`: the model to test beside the tiny ones.

    Raises:
        ModelError, ConfigError: the model cannot be loaded, or cannot be trained.
    """

    def keep(model: str, result: CheckResult) -> None:
        section.checks.append({"model": model, **result.as_json()})
        on_result(model, result)

    await tested_models(choice, keep)


async def memory(section: Section, path: str | None) -> None:
    """The memory of steps with lookahead (`ahead`) and without (`apart`), while the KV pool holds a long prefix.

    Raises:
        ModelError, ConfigError: the model cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="mlx_parallm-bench-") as folder:
        section.memory = asdict(await step_memory(path, _CACHED, Path(folder)))


class Sides:
    """This engine and mlx-lm with one model, and what both are asked. Each round of a figure has prompts of its own."""

    def __init__(
        self, engine: Engine, ours: Ours, mlx_lm: MlxLm, weights: AdapterWeights, vocabulary: int, sizes: Sizes
    ) -> None:
        self._run, self._ours, self._mlx_lm = engine.processor.run, ours, mlx_lm
        self._weights, self._vocabulary, self._sizes = weights, vocabulary, sizes

    @classmethod
    async def of(cls, engine: Engine, served: Served, path: str | None, sizes: Sizes) -> Sides:
        """Loads the model for mlx-lm too, and publishes the adapters."""
        ours = Ours(engine, served)
        weights = random_adapter(ours.trainer.model.layout, seed=0, rank=RANK, everywhere=True)
        await ours.publish(weights)
        dtype = getattr(mx, served.card.dtype)
        mlx_lm = await engine.processor.run(lambda: MlxLm(path, weights, dtype))
        return cls(engine, ours, mlx_lm, weights, served.card.vocab_size, sizes)

    async def decode(self, section: Section, until: float) -> None:
        """Decode steps of several numbers of rows: greedy with the base model, one adapter and eight; and sampled."""
        section.figures += [
            *(self._decode(rows, adapters, _GREEDY) for rows in ROWS for adapters in _ADAPTERS if adapters <= rows),
            *(self._decode(rows, 0, _TOP_P) for rows in _TOP_P_ROWS),
        ]
        await compare(section.figures, until)

    async def prefill(self, section: Section, until: float) -> None:
        """Single prompts of several lengths, of the base model and of an adapter."""
        section.figures += [self._prefill(length, adapters) for length in self._sizes.prompts for adapters in (0, 1)]
        await compare(section.figures, until)

    async def update(self, section: Section, until: float) -> None:
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

    def _samples(self, number: int) -> tuple[Sample, ...]:
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
