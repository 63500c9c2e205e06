"""InferenceEngine: where the samples of a training run come from.

Rollouts ─▶ InferenceEngine ─┬▶ SharedEngine    this process, on the weights that are trained
                             └▶ OutsideEngine   a server of its own: `sync` sends it the adapter, an `EngineApi` asks it
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.core.requests import Event, GenerationRequest


class InferenceEngine(Protocol):
    """Draws the samples of a training run. Event loop's thread only."""

    async def open(self, adapter: AdapterRef) -> None:
        """Checks, before the first sample, that the engine can do with this version what training needs.

        Raises:
            ConfigError: it cannot.
        """

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Answers a request with the adapter version that it names; see `core.EngineClient.generate`. Each output has
        `sampling_logprobs`."""

    async def close(self) -> None:
        """Leaves nothing behind in the engine. Safe to call after `open` has failed."""


class SharedEngine:
    """The engine of this process. Serving and training are the same arrays, so there is nothing to copy or to send."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def open(self, adapter: AdapterRef) -> None:
        pass

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        return self._engine.generate(request)

    async def close(self) -> None:
        pass
