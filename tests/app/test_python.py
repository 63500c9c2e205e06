"""What a Python program imports from `mlx_parallm`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mlx_parallm

CLASSES = (
    *("SharedModelManager", "LoRABatchedKVCache", "ContinuousBatchProcessor", "RLAwareScheduler", "CheckpointManager"),
    *("GRPOTrainer", "RLIntegratedServer", "LoRAConfig", "RLConfig"),
)


@pytest.mark.parametrize("name", CLASSES)
def test_class_is_there(name: str) -> None:
    assert name in mlx_parallm.__all__
    assert getattr(mlx_parallm, name).__name__ == name


@pytest.mark.parametrize(
    ("module", "left_out"),
    [("mlx_parallm", ("mlx.core", "transformers")), ("mlx_parallm.app.train", ("fastapi", "mlx_parallm.server"))],
)
def test_importing_loads_no_more_than_is_used(module: str, left_out: tuple[str, ...]) -> None:
    """The package alone loads no MLX, and a run without HTTP nothing that serves."""
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in {left_out}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "mlx_parallm", "version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert f"mlx_parallm {mlx_parallm.__version__}" in done.stdout
