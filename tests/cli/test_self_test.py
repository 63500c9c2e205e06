"""`mlx_parallm doctor --self-test`: what it prints and writes, and its exit status."""

import json

import pytest

from mlx_parallm.cli.main import main
from mlx_parallm.selftest import run as running
from mlx_parallm.selftest.check import Check, Outcome
from mlx_parallm.selftest.checks import CHECKS
from mlx_parallm.selftest.limits import Limit


def test_it_passes_here_and_writes_a_report_without_names(tmp_path, capsys, monkeypatch):
    """With some of the checks; `tests/selftest` runs all of them."""
    monkeypatch.setattr(running, "CHECKS", [check for check in CHECKS if "adapters" in check.name])
    file = tmp_path / "report.json"
    assert main(["doctor", "--self-test", "--only-tiny", "--report", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "ok      tiny, float32          mixed adapters" in printed
    assert "checks passed" in printed
    report = json.loads(file.read_text())
    assert (report["format"], report["passed"]) == (1, True)
    assert [model["name"] for model in report["models"]] == ["tiny, float32", "tiny, 4-bit"]
    assert all(check["limit_from"] for model in report["models"] for check in model["checks"])
    assert str(tmp_path) not in file.read_text()


@pytest.fixture
def one_check(monkeypatch):
    """Only one check, of one model, which fails."""

    async def fails(tested):
        return Outcome(0.5, Limit(1e-5, "the tests"))

    check = Check("mixed adapters", "rows with rows", "Serve the base model only.", fails)
    first = running.tiny_models
    monkeypatch.setattr(running, "CHECKS", (check,))
    monkeypatch.setattr(running, "tiny_models", lambda folder: [next(first(folder))])


def test_a_failure_says_what_to_do(one_check, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert main(["doctor", "--self-test", "--only-tiny", "--report", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED  tiny, float32          mixed adapters           5.0e-01, limit 1.0e-05" in printed
    assert "the largest difference, 0.5, is above the limit. Compared: rows with rows. Limit: the tests." in printed
    assert "Serve the base model only." in printed
    assert "1 of 1 checks failed" in printed
    assert json.loads(file.read_text())["models"][0]["checks"][0]["advice"] == "Serve the base model only."


@pytest.mark.parametrize("flag", [["--only-tiny"], ["--report", "x.json"], ["--model-path", "x"]])
def test_its_flags_need_it(flag, capsys):
    assert main(["doctor", *flag]) == 2
    assert f"{flag[0]} belongs to --self-test" in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path, capsys):
    assert main(["doctor", "--self-test", "--model-path", str(tmp_path / "none")]) == 1
    assert "no model directory" in capsys.readouterr().err


@pytest.mark.slow
def test_the_bundled_model(tmp_path, capsys):
    file = tmp_path / "report.json"
    assert main(["doctor", "--self-test", "--report", str(file)]) == 0, capsys.readouterr().out
    bundled = json.loads(file.read_text())["models"][-1]
    assert bundled["name"] == "SmolLM2-135M-Instruct"
    assert {"quantized weights", "training gradients"} <= {check["name"] for check in bundled["checks"]}
    names = [timing["name"] for timing in bundled["timings"]]
    assert names[:3] == ["decode step, 1 row", "decode step, 8 rows", "decode step, 16 rows"]
    assert all(timing["seconds"] > 0 for timing in bundled["timings"])
