"""This engine, measured through the interface that the server uses: from a request to the events that answer it.

So a rate includes scheduling, detokenisation and the delivery of each token to the caller, and no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import count

from mlx_parallm.adapters.weights import AdapterWeights, VersionInfo
from mlx_parallm.app.build import RunningEngine, Served
from mlx_parallm.bench.sizes import ADAPTERS, RANK, SCALE
from mlx_parallm.config import ModelConfig
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import GenerationRequest, SamplingParams, SequenceOutput, StopParams
from mlx_parallm.rl.rollouts.answers import events_of
from mlx_parallm.train.data import Datum, UpdateBatch
from mlx_parallm.train.policy import Policy, PolicySnapshot
from mlx_parallm.train.trainer import GRPOTrainer

SETTLED = 3
"""Tokens of each row before decode steps are measured, on both sides."""
_SPARE = 96
"""Steps for rows that begin early, because the prompts of the others are computed beside them."""


class Ours:
    """A running engine with adapters."""

    def __init__(self, engine: RunningEngine, served: Served) -> None:
        self._processor, self._served = engine.processor, served
        self._adapters: list[AdapterRef] = []
        self._policy: Policy | None = None
        self._ids = count()

    @property
    def trainer(self) -> GRPOTrainer:
        """The engine's own trainer."""
        assert self._served.training is not None  # `run.opened` turns training on
        return self._served.training.parts.learner.trainer

    async def publish(self, weights: AdapterWeights) -> None:
        """Makes the adapters. All have the same weights, whose values do not change the time."""
        info = VersionInfo.of(weights)
        for number in range(ADAPTERS):
            self._adapters.append((await self._served.adapters.publish(f"bench-{number}", weights, info)).ref)

    # -- requests --------------------------------------------------------------------------------

    async def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, adapters: int, steps: int, seconds: float
    ) -> float:
        """Tokens a second of rows that decode together.

        Args:
            adapters: how many the rows use in turn; 0: the base model.
            steps, seconds: most decode steps, and their most seconds.

        Raises:
            EngineError: a request failed.
        """
        await self._processor.reset_prefix_cache()
        window = Window(len(prompts), steps, seconds)

        async def row(at: int) -> None:
            adapter = self._adapters[at % adapters] if adapters else BASE_ADAPTER
            events = events_of(self._processor.generate(self._request(prompts[at], steps + _SPARE, sampling, adapter)))
            async for event in events:
                if isinstance(event, SequenceOutput) and not window.add(at, len(event.token_ids)):
                    await events.aclose()
                    break

        async with asyncio.TaskGroup() as group:
            for at in range(len(prompts)):
                group.create_task(row(at))
        return window.rate

    async def prefill(self, prompt: Sequence[int], sampling: SamplingParams, adapters: int) -> float:
        """Prompt tokens a second, from the request to its first token."""
        await self._processor.reset_prefix_cache()
        adapter = self._adapters[0] if adapters else BASE_ADAPTER
        started = time.perf_counter()
        async for event in events_of(self._processor.generate(self._request(prompt, 1, sampling, adapter))):
            if isinstance(event, SequenceOutput):
                first = time.perf_counter()
        return len(prompt) / (first - started)

    def _request(
        self, prompt: Sequence[int], tokens: int, sampling: SamplingParams, adapter: AdapterRef
    ) -> GenerationRequest:
        stopping = StopParams(tokens, ignore_eos=True)
        return GenerationRequest(f"bench-{next(self._ids)}", (tuple(prompt),), sampling, stopping, adapter=adapter)

    # -- updates ---------------------------------------------------------------------------------

    async def update(self, samples: tuple[Datum, ...], weights: AdapterWeights) -> float:
        """Seconds of an update of a policy that began with these weights, between the engine's other work. If it is
        cancelled, nothing of it runs on.

        Raises:
            RuntimeError: the update was skipped.
        """
        if self._policy is None:
            self._policy = await self._processor.run(lambda: self._policy_of(weights))
        policy = self._policy
        started = time.perf_counter()
        try:
            outcome = await self._processor.run(lambda: self.trainer.begin(policy, UpdateBatch(samples)))
        except asyncio.CancelledError:
            await self._processor.run(lambda: self.trainer.abandon(policy))
            raise
        seconds = time.perf_counter() - started
        if outcome.skipped:
            raise RuntimeError(f"the update was skipped: {outcome.skipped}")
        return seconds

    def _policy_of(self, weights: AdapterWeights) -> Policy:
        lora = ModelConfig(lora_rank=RANK, lora_alpha=SCALE * RANK, lora_target_modules=weights.targets)
        return Policy(self.trainer.model.layout, lora, start=PolicySnapshot(weights, {}, 0))


class Window:
    """The time in which all rows decode: from the `SETTLED`th token of the last row, for some steps or seconds."""

    def __init__(self, rows: int, steps: int, seconds: float) -> None:
        self._times: list[list[float]] = [[] for _ in range(rows)]
        self._unsettled, self._steps, self._seconds = rows, steps, seconds
        self._started: float | None = None
        self._tokens = 0

    def add(self, row: int, tokens: int) -> bool:
        """Adds tokens that a row has got now. Returns False when the window is over."""
        now, times = time.perf_counter(), self._times[row]
        before = len(times)
        times += [now] * tokens
        if self._started is None:
            self._unsettled -= before < SETTLED <= len(times)
            self._started = None if self._unsettled else now
            return True
        self._tokens += tokens
        return now - self._started < self._seconds and self._tokens < self._steps * len(self._times)

    @property
    def rate(self) -> float:
        """Tokens a second of all rows. Raises RuntimeError: a row ended before the last one had begun."""
        end = min(times[-1] if times else 0.0 for times in self._times)
        if self._started is None or end <= self._started:
            raise RuntimeError("the rows did not all decode at the same time")
        started = self._started
        return sum(started < at <= end for times in self._times for at in times) / (end - started)
