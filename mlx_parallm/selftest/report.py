"""The report of the self-test: for people as text, and as JSON in a file that can be attached to an issue.

The file names the machine's kind, the versions and the figures. It has no path, no host name and no user name.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

import mlx_parallm
from mlx_parallm.model.device import device_name, machine_memory
from mlx_parallm.selftest.check import CheckResult
from mlx_parallm.selftest.tested import TestedModel
from mlx_parallm.selftest.timings import Timing

FORMAT = 1
"""Raised when a key of the file changes its meaning."""
_PACKAGES = ("mlx", "mlx-lm", "numpy", "transformers", "tokenizers", "safetensors", "llguidance")


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What was found of one model. `served_as`: how the device holds its weights."""

    name: str
    served_as: str
    results: tuple[CheckResult, ...]
    timings: tuple[Timing, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    def as_json(self) -> dict[str, Any]:
        """For the report's file."""
        return {
            "name": self.name,
            "served_as": self.served_as,
            "passed": self.passed,
            "seconds": self.seconds,
            "checks": [result.as_json() for result in self.results],
            "timings": [timing.as_json() for timing in self.timings],
        }


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """What was found of all models, and what they ran on."""

    machine: dict[str, Any]
    models: tuple[ModelReport, ...]

    @property
    def passed(self) -> bool:
        return all(model.passed for model in self.models)

    def as_json(self) -> dict[str, Any]:
        """The content of the report's file."""
        models = [model.as_json() for model in self.models]
        return {"format": FORMAT, "passed": self.passed, "machine": self.machine, "models": models}


def served_as(tested: TestedModel) -> str:
    """How the device holds the model's weights, such as `4-bit, bfloat16 activations`."""
    card = tested.served.card
    stored = "" if card.quantization == "none" else f"{card.quantization}, "
    return f"{stored}{card.dtype} activations"


def describe_machine() -> dict[str, Any]:
    """The machine's kind and the versions. The name of a GPU is that of its kind."""
    memory = machine_memory()
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "device": device_name(),
        "backend": "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else "cpu",
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
        "cores": os.cpu_count(),
        "ram_bytes": memory.ram,
        "device_bytes": memory.recommended,
        "blas": mlx_parallm.BLAS.name,
        "python": platform.python_version(),
        "versions": {"mlx-parallm": mlx_parallm.__version__, **versions},
    }
