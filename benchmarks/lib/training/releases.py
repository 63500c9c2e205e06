"""What rows of released models take, by their published widths, and how many fit on a Mac."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lib.training.accounting import MAC_SHARE

from mlx_parallm.core import default_budget
from mlx_parallm.model.device import MachineMemory, memory_limits

BITS = 4.5
"""Of a weight in 4-bit, with the scales of its group."""
NUMBER = 2
"""Bytes of a key's or value's number."""


@dataclass(frozen=True, slots=True)
class Release:
    """A released model. `full`, `windowed`: layers with attention, and numbers that each keeps for a token; the latter
    keep `window` tokens. `state`: bytes that recurrent layers keep for a row, in float32."""

    name: str
    family: str
    parameters: float
    full: tuple[int, int]
    windowed: tuple[int, int] = (0, 0)
    window: int = 0
    state: int = 0

    def row_bytes(self, tokens: int) -> int:
        """Keys, values and states of a row."""
        seen = min(tokens, self.window + 64)
        numbers = self.full[0] * self.full[1] * tokens + self.windowed[0] * self.windowed[1] * seen
        return NUMBER * numbers + self.state


def delta_state(layers: int, heads: int, width: int) -> int:
    """Of gated delta nets: a matrix for each head."""
    return 4 * layers * heads * width * width


RELEASES = (
    Release("Llama 3.2 3B", "llama", 3.21e9, (28, 2 * 8 * 128)),
    Release("Qwen3 8B", "qwen3", 8.19e9, (36, 2 * 8 * 128)),
    Release("Ministral 3 8B", "ministral3", 8.5e9, (34, 2 * 8 * 128)),
    Release("Qwen3.5 4B", "qwen3_5", 4.2e9, (8, 2 * 4 * 256), state=delta_state(24, 32, 128)),
    Release("Qwen3.5 35B-A3B", "qwen3_5_moe", 35e9, (10, 2 * 2 * 256), state=delta_state(30, 32, 128)),
    Release("Gemma 4 E2B", "gemma4", 5.1e9, (3, 2 * 512), (12, 2 * 256), 512),
    Release("Gemma 4 26B-A4B", "gemma4", 26e9, (5, 2 * 2 * 512), (25, 2 * 8 * 256), 1024),
    Release("gpt-oss-20b", "gpt_oss", 20.9e9, (12, 2 * 8 * 64), (12, 2 * 8 * 64), 128),
    Release("GLM-4.7-Flash", "glm4_moe_lite", 30e9, (47, 576)),
    Release("LFM2.5 1.2B", "lfm2", 1.17e9, (6, 2 * 8 * 64)),
)


def fit(release: Release, tokens: int) -> Mapping[str, object]:
    """Sizes in bytes, and by the memory of a Mac how many rows of so many tokens fit beside the weights, without
    training."""
    weights, row = int(release.parameters * BITS / 8), release.row_bytes(tokens)
    rows = {}
    for gigabytes, share in MAC_SHARE.items():
        memory = gigabytes << 30
        limits = memory_limits(MachineMemory(memory, int(share * memory), can_wire=True))
        rows[str(gigabytes)] = default_budget(limits.memory, limits.cache, weights, None) // row
    return {"name": release.name, "family": release.family, "weights": weights, "row": row, "rows": rows}
