"""Engines of tiny models as a process builds them from its configuration, and their greedy answers."""

from __future__ import annotations

from pathlib import Path

from mlx_parallm.app.build import RunningEngine
from mlx_parallm.config import configure
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import GenerationRequest, RequestFinished, SamplingParams, SequenceOutput, StopParams


def engine(model: Path, **keys: object) -> RunningEngine:
    """One that is not started, and does not train."""
    return RunningEngine(configure(model, rl_training__enabled=False, server__kv_cache_memory="16MB", **keys))


async def answer(
    engine: RunningEngine, prompt: tuple[int, ...], most: int = 8, adapter: AdapterRef | None = None
) -> tuple[list[int], RequestFinished]:
    """`most` tokens, and how the request has ended."""
    pin = {} if adapter is None else {"adapter": adapter}
    request = GenerationRequest(
        "x", (prompt,), SamplingParams(temperature=0.0), StopParams(most, ignore_eos=True), **pin
    )
    events = [event async for event in engine.processor.generate(request)]
    assert isinstance(events[-1], RequestFinished)
    return [token for event in events if isinstance(event, SequenceOutput) for token in event.token_ids], events[-1]
