"""Which architectures the tests know, and with which versions of MLX and mlx-lm.

Adding a model family that mlx-lm has: add the name of its model file to `TESTED` here and a tiny configuration to
`tests/tiny.py`; the parity tests then run for it. Others are compared with themselves before they serve; see `checks`.
If a family has its own way to write tool calls, see `tools/syntax.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

import mlx.nn as nn
from packaging.version import Version

TESTED = frozenset({
    *("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gemma2", "gemma3", "gemma3_text"),
    *("phi3", "lfm2", "mamba", "mamba2", "qwen3_next"),
})  # fmt: skip
"""mlx-lm model files for which the tests compare batched rows with solo runs. mistral uses mlx-lm's `llama`."""

TRIED = {"mlx": ("0.32.2", "0.32.4"), "mlx-lm": ("0.32.0", "0.32.2")}
"""By package, the oldest and the newest version that the tests ran with. pyproject.toml allows newer ones."""


@dataclass(frozen=True, slots=True)
class Family:
    """An mlx-lm model file. `tested`: the tests compare its batched rows with solo runs."""

    name: str
    tested: bool


def untried_packages() -> tuple[str, ...]:
    """The installed packages of `TRIED` in a version outside of it, as `mlx 0.33.0`."""
    installed = ((name, metadata.version(name), ends) for name, ends in TRIED.items())
    return tuple(
        f"{name} {version}"
        for name, version, (oldest, newest) in installed
        if not Version(oldest) <= Version(version) <= Version(newest)
    )


def family_of(model: nn.Module) -> Family:
    """The model's family. One that is not tested is compared with itself before it serves."""
    package, _, name = type(model).__module__.rpartition(".")
    return Family(name, package == "mlx_lm.models" and name in TESTED)
