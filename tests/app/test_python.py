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


def test_importing_the_package_loads_no_mlx() -> None:
    code = "import sys, mlx_parallm; sys.exit(any(name in sys.modules for name in ('mlx.core', 'transformers')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'SharedModel'"):
        mlx_parallm.SharedModel  # noqa: B018


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "mlx_parallm", "version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert f"mlx_parallm {mlx_parallm.__version__}" in done.stdout
