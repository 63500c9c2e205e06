"""The report of `mlx_parallm doctor`."""

import re

import pytest

import mlx_parallm
from mlx_parallm.cli.doctor import is_slow, report
from mlx_parallm.model.device import machine_memory, memory_limits


def test_matmul_is_fast_here_and_the_report_says_so():
    texts = (report().text for _ in range(5))  # a busy machine may be slow for a moment
    text = next((text for text in texts if "warning" not in text), "")
    speed = re.search(r"^1024³ matmul +(\d+) GFLOP/s.* \(NumPy: (\d+)\)$", text, re.MULTILINE)
    assert speed
    assert mlx_parallm.BLAS.name in text
    assert "SmolLM2-135M-Instruct" in text
    limit = memory_limits(machine_memory()).memory
    assert f"{limit / 2**30:.1f} GiB, 32 MiB of it cached buffers, none wired" in text


@pytest.mark.parametrize(("ours", "numpys", "slow"), [(6, 200, True), (120, 400, False), (60, 100, False)])
def test_slow_means_under_100_and_under_half_of_numpys(ours, numpys, slow):
    assert is_slow(ours, numpys) is slow


def test_a_slow_blas_and_a_missing_model_are_warned_of(monkeypatch):
    monkeypatch.setattr("mlx_parallm.cli.doctor.matmul_gflops", lambda: 6.0)
    monkeypatch.setattr("mlx_parallm.cli.doctor.numpy_gflops", lambda: 200.0)
    monkeypatch.setattr("mlx_parallm.model.bundled.PACKAGES", ("no_such_package",))
    *facts, blas, model = report().text.splitlines()
    assert facts[-1].split() == ["bundled", "model", "not", "installed"]
    assert blas.startswith("warning: ")
    assert "libopenblas" in blas
    assert model.startswith("warning: ")
    assert "pip install" in model
