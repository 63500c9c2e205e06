"""Whether MLX itself gives the same on this device in other shapes. The limits of the other checks rest on that."""

from __future__ import annotations

from mlx_parallm.selftest.check import Check, Outcome
from mlx_parallm.selftest.tested import TestedModel


async def _rounds(tested: TestedModel) -> Outcome:
    return Outcome(tested.rounding.logprobs, tested.rounding.most)


CHECK = Check(
    name="plain forward pass",
    compared="mlx-lm's own forward pass over a sequence, at once and in parts with mlx-lm's own KV cache",
    advice=(
        "MLX computes wrongly on this device, without this project's engine. Update macOS or the GPU's driver, and "
        "MLX; if it stays, report it to MLX. Trust none of the rows below."
    ),
    run=_rounds,
)
