"""SpreadEngine: takes the samples of a training run from several engines at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import Event, GenerationRequest
from mlx_parallm.errors import EngineError
from mlx_parallm.rl.rollouts.answers import InferenceEngine

_AGAIN_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Load:
    """An engine. `tokens`: the most that the requests which it is answering compute. `failures`: in a row."""

    engine: InferenceEngine
    tokens: int = 0
    failures: int = 0


class SpreadEngine:
    """Implements `InferenceEngine`: each request goes to the engine with the fewest tokens to do, and if that fails to
    another one.

    Args:
        engines: each gives the events of an answer only when it has all of them, so that one that fails can be sampled
            again.
        patience_s: how long it tries again while all engines fail.
    """

    def __init__(self, engines: Sequence[InferenceEngine], patience_s: float) -> None:
        self._loads = [_Load(engine) for engine in engines]
        self._patience_s = patience_s

    async def open(self, adapter: AdapterRef) -> None:
        """See `InferenceEngine.open`."""
        for load in self._loads:
            await load.engine.open(adapter)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """See `InferenceEngine.generate`."""
        for event in await self._answer(request):
            yield event

    async def close(self) -> None:
        """See `InferenceEngine.close`."""
        for load in self._loads:
            await load.engine.close()

    async def _answer(self, request: GenerationRequest) -> list[Event]:
        """Raises EngineError: all engines fail."""
        deadline, failed = time.monotonic() + self._patience_s, set[_Load]()
        while True:
            load = min(self._loads, key=lambda load: (load in failed, load.failures, load.tokens))
            try:
                return await self._drawn(load, request)
            except EngineError as error:
                load.failures += 1
                failed.add(load)
                if time.monotonic() > deadline:
                    raise
                _log.warning("an answer is drawn again: %s", error)
            if len(failed) == len(self._loads):
                failed.clear()
                await asyncio.sleep(_AGAIN_S)

    async def _drawn(self, load: _Load, request: GenerationRequest) -> list[Event]:
        tokens = sum(map(len, request.prompts)) + request.sequences * request.stopping.max_tokens
        load.tokens += tokens
        try:
            async with aclosing(cast(AsyncGenerator[Event, None], load.engine.generate(request))) as events:
                answer = [event async for event in events]
        finally:
            load.tokens -= tokens
        load.failures = 0
        return answer
