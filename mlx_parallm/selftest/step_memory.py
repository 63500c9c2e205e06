"""How much memory steps take besides what the engine holds between them, with and without lookahead.

Most of what the engine holds is the KV pool. MLX writes into an array in place only if nothing else holds it, and what
is in flight holds its inputs. A step that is launched too early therefore copies arrays of the pool, and its peak shows
that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.app.build import Served
from mlx_parallm.config import configure
from mlx_parallm.core.requests import GenerationRequest, SamplingParams, StopParams
from mlx_parallm.rl.rollouts.answers import events_of
from mlx_parallm.selftest.inputs import random_tokens
from mlx_parallm.selftest.tested import started

_CHUNK, _PROMPT, _STEPS = 16, 40, 24
_ANSWERS = 3


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The most bytes that steps took besides what the engine held: launched before the tokens of the step before were
    read (`ahead`), and launched after that (`apart`)."""

    ahead: int
    apart: int


async def step_memory(path: str | None, cached: int, folder: Path) -> StepMemory:
    """Measures the steps of a short answer while the pool holds a long cached prefix. It loads the model twice.

    Args:
        path: of the model; None is the bundled one.
        cached: tokens of the prefix.
        folder: where the engine may write. It is empty.

    Raises:
        ModelError, ConfigError: the model cannot be loaded.
        EngineError: a request failed.
    """
    ahead = await _measured(path, cached, folder / "ahead", lookahead=True)
    return StepMemory(ahead, await _measured(path, cached, folder / "apart", lookahead=False))


async def _measured(path: str | None, cached: int, folder: Path, lookahead: bool) -> int:
    keys: dict[str, Any] = {
        "server__max_batched_tokens": _CHUNK,
        "rl_training__enabled": False,
        "checkpointing__checkpoint_dir": str(folder),
        "debug__lookahead": lookahead,
    }
    async with started(configure(path, **keys)) as (engine, served):
        vocabulary = served.card.vocab_size
        await _answer(served, random_tokens(vocabulary, cached, seed=1), 1)
        found = list[int]()
        for number in range(_ANSWERS):  # the pool may grow during one of them, which takes memory too
            before = await engine.processor.run(_begin)
            await _answer(served, random_tokens(vocabulary, _PROMPT, seed=2 + number), _STEPS)
            peak, after = await engine.processor.run(lambda: (mx.get_peak_memory(), mx.get_active_memory()))
            found.append(peak - max(before, after))
        return min(found)


def _begin() -> int:
    """Bytes that are held between two steps, from which the peak rises."""
    mx.reset_peak_memory()
    return mx.get_active_memory()


async def _answer(served: Served, prompt: Sequence[int], tokens: int) -> None:
    request = GenerationRequest(
        f"step-memory-{len(prompt)}-{prompt[:4]}",
        (tuple(prompt),),
        SamplingParams(temperature=0.0),
        StopParams(tokens, ignore_eos=True),
    )
    async for _ in events_of(served.engine.generate(request)):
        pass
