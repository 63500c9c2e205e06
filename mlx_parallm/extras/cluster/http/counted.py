"""CountedEngine: this node's own engine, with the tokens of the requests that it is answering."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import cast

from mlx_parallm.core.device import DeviceSchedule, PauseMode
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.core.requests import Event, GenerationRequest
from mlx_parallm.engine.figures import EngineStats

ANSWER_TOKENS = 1024
"""Tokens of one answer that count at most. Many clients leave `max_tokens` out, which allows an answer as long as the
context; few answers get that long."""


def tokens_of(request: GenerationRequest) -> int:
    """The tokens that a request will compute, as far as that is known: those of its prompts and of its answers."""
    answer = min(request.stopping.max_tokens, ANSWER_TOKENS)
    return sum(map(len, request.prompts)) + request.sequences * answer


class TokenLoad:
    """The tokens of requests under way."""

    def __init__(self) -> None:
        self.tokens = 0

    @contextmanager
    def of(self, tokens: int) -> Iterator[None]:
        """Counts a request's tokens while the block runs."""
        self.tokens += tokens
        try:
            yield
        finally:
            self.tokens -= tokens


class CountedEngine:
    """Implements `core.EngineClient` with another engine."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.load = TokenLoad()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """See `core.EngineClient.generate`."""
        with self.load.of(tokens_of(request)):
            async with aclosing(cast(AsyncGenerator[Event, None], self._engine.generate(request))) as events:
                async for event in events:
                    yield event

    def stats(self) -> EngineStats:
        """See `core.EngineClient.stats`."""
        return self._engine.stats()

    async def reschedule(self, schedule: DeviceSchedule) -> None:
        """See `core.EngineClient.reschedule`."""
        await self._engine.reschedule(schedule)

    async def pause(self, mode: PauseMode) -> None:
        """See `core.EngineClient.pause`."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """See `core.EngineClient.resume`."""
        await self._engine.resume()

    async def reset_prefix_cache(self, files: bool = False) -> int:
        """See `core.EngineClient.reset_prefix_cache`."""
        return await self._engine.reset_prefix_cache(files)

    async def sleep(self, bank: bool = False) -> None:
        """See `core.EngineClient.sleep`."""
        await self._engine.sleep(bank)
