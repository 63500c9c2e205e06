"""Whether a step copies the KV pool."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mlx_parallm.selftest.check import Check, Outcome
from mlx_parallm.selftest.limits import TINY_PARAMETERS, Limit
from mlx_parallm.selftest.models import KEY_BYTES, large_pool_model
from mlx_parallm.selftest.step_memory import step_memory
from mlx_parallm.selftest.tested import TestedModel

_CACHED = 1000
_LIMIT = Limit(0.5, "a step that copies the pool takes at least the memory of one of its arrays")


async def _copies(_tested: TestedModel) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="mlx_parallm-step-memory-") as name:
        folder = Path(name)
        found = await step_memory(str(large_pool_model(folder)), _CACHED, folder)
    array = _CACHED * KEY_BYTES
    figures = {"ahead_bytes": found.ahead, "apart_bytes": found.apart, "array_bytes": array}
    copies = max(found.ahead, found.apart) > _LIMIT.value * array
    problem = (
        f"a step copies the KV pool: steps took {found.ahead >> 10} KiB when launched ahead, {found.apart >> 10} KiB "
        f"otherwise, and an array of the pool has {array >> 10} KiB"
    )
    shares = [found.ahead / array, found.apart / array]
    return Outcome.of(shares, _LIMIT, problem if copies else "", figures)


CHECK = Check(
    name="memory of steps",
    compared="the peak of memory in steps with and without lookahead, as a share of an array of the KV pool",
    advice=(
        "Answers are right, but each step is slower by a copy of the KV pool. Leave MLX_MAX_OPS_PER_BUFFER and "
        "MLX_MAX_MB_PER_BUFFER as they are, set debug.lookahead to false, and attach the report to an issue."
    ),
    run=_copies,
    # once, because it makes a model of its own
    applies=lambda tested: tested.rounding.parameters < TINY_PARAMETERS and tested.served.card.quantization != "none",
)
