"""`mlx_parallm bench --report`: the file, the exit status, and what a fault or a signal leaves."""

import asyncio
import json
import os
import signal
import statistics
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.bench import run as running
from mlx_parallm.cli.main import main
from mlx_parallm.selftest.models import tiny_models
from mlx_parallm.selftest.step_memory import StepMemory

SECTIONS = ["self-test", "memory", "device", "load", "decode", "prefill", "adapters", "update", "live"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The folder of a tiny random model."""
    choice = next(tiny_models(tmp_path_factory.mktemp("models")))
    assert choice.path is not None
    return choice.path


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "report.json"


def report(file: Path, model: str, *more: str) -> tuple[int, dict[str, Any]]:
    """The exit status of the command, and what it wrote."""
    status = main(["bench", "--report", str(file), "--sizes", "tiny", "--model-path", model, *more])
    return status, json.loads(file.read_text())


def statuses(found: dict[str, Any]) -> dict[str, str]:
    return {name: section["status"] for name, section in found["sections"].items()}


@pytest.fixture
def unloadable(monkeypatch):
    """The engine does not start; the self-test and the measurement of memory do nothing."""

    @asynccontextmanager
    async def fails(config):
        raise RuntimeError("no device")
        yield

    async def nothing(choice, on_result):
        return ()

    async def measured(path, cached, folder):
        return StepMemory(ahead=3 << 19, apart=1 << 20)

    monkeypatch.setattr(running, "started", fails)
    monkeypatch.setattr(running, "step_memory", measured)
    monkeypatch.setattr(running, "tested_models", nothing)


def test_a_section_that_fails_costs_itself_and_what_needs_it(unloadable, file, model, capsys):
    status, found = report(file, model)
    assert (status, found["passed"], found["interrupted"]) == (1, False, None)
    done = {"self-test": "done", "memory": "done", "device": "done"}
    assert statuses(found) == {**done, "load": "failed", **dict.fromkeys(SECTIONS[4:], "not begun")}
    assert found["sections"]["load"]["problem"] == "RuntimeError: no device"
    assert found["sections"]["memory"]["facts"] == {"ahead": 3 << 19, "apart": 1 << 20}
    printed = capsys.readouterr().out
    assert "a step takes 1.5 MiB besides what is held, 1.0 MiB without lookahead" in printed
    assert "RuntimeError: no device\nfailed after 0 s" in printed


def test_an_error_that_names_the_models_folder_does_not_in_the_report(unloadable, file, model, monkeypatch, capsys):
    async def fails(path, cached, folder):
        raise ValueError(f"{path}: no tensors in {path}/model.safetensors")

    monkeypatch.setattr(running, "step_memory", fails)
    _, found = report(file, model, "--json")
    assert found["sections"]["memory"]["problem"] == (
        "ValueError: a local folder: no tensors in a local folder/model.safetensors"
    )
    assert model not in file.read_text() + capsys.readouterr().out


def test_json_is_the_report(unloadable, file, model, capsys):
    _, found = report(file, model, "--json")
    printed = json.loads(capsys.readouterr().out)
    assert {**printed, "seconds": 0} == {**found, "seconds": 0}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_file_with_what_there_is(unloadable, file, model, number, status, monkeypatch):
    before: list[dict[str, str]] = []

    async def signalled(choice, on_result):
        before.append(statuses(json.loads(file.read_text())))
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)

    monkeypatch.setattr(running, "tested_models", signalled)
    assert report(file, model)[0] == status
    found = json.loads(file.read_text())
    assert (found["interrupted"], found["passed"]) == (signal.Signals(number).name, False)
    assert statuses(found) == {"self-test": "interrupted", **dict.fromkeys(SECTIONS[1:], "not begun")}
    assert before == [{"self-test": "running", **dict.fromkeys(SECTIONS[1:], "not begun")}]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_an_error_of_what_a_signal_cancels_does_not_hide_the_signal(unloadable, file, model, monkeypatch):
    async def signalled(choice, on_result):
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            raise RuntimeError("the device thread has stopped")

    monkeypatch.setattr(running, "tested_models", signalled)
    assert report(file, model)[0] == 130
    assert statuses(json.loads(file.read_text())) == {
        "self-test": "interrupted",
        **dict.fromkeys(SECTIONS[1:], "not begun"),
    }


def test_a_file_that_cannot_be_written_is_known_at_the_start(tmp_path, model, capsys, unloadable):
    def ended(path: Path) -> int:
        return main(["bench", "--report", str(path), "--sizes", "tiny", "--model-path", model])

    os.mkfifo(pipe := tmp_path / "pipe")
    assert (ended(tmp_path), ended(pipe), ended(tmp_path / "no" / "x.json")) == (2, 2, 1)
    assert ended(tmp_path / ("x" * 300)) == 1
    assert pipe.is_fifo(), "a device is not replaced by a file"
    printed = capsys.readouterr()
    assert "is not a file" in printed.err
    assert "cannot be written" in printed.err
    assert "self-test" not in printed.out


@pytest.mark.parametrize(
    "flags", [["--url", "http://x"], ["--max-tokens", "3"], ["--no-ignore-eos"], ["--api-key", "k"]]
)
def test_flags_of_a_server_are_refused(flags, file, capsys):
    assert main(["bench", "--report", str(file), *flags]) == 2
    assert f"leave out {flags[0]}" in capsys.readouterr().err
    assert not file.exists()


def test_the_name_of_a_model_is_not_its_path(file, capsys):
    assert main(["bench", "--report", str(file), "--model", "x"]) == 2
    assert "pass --model-path" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--model-path", "x"], ["--sizes", "tiny"], ["--minutes", "3"]])
def test_its_flags_need_it(flags, capsys):
    assert main(["bench", *flags]) == 2
    assert f"{flags[0]} belongs to --report" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tiny_model(file, model, capsys):
    status, found = report(file, model)
    assert status == 0, capsys.readouterr().out
    assert statuses(found) == dict.fromkeys(SECTIONS, "done")
    assert (found["passed"], found["budget_s"]) == (True, 600.0)
    assert found["seconds"] < 600
    assert {"device", "ram_bytes", "system", "versions"} <= found["machine"].keys()
    assert {"mlx", "mlx-lm", "mlx-parallm"} <= found["machine"]["versions"].keys()
    assert found["model"]["parameters"] > 0
    assert found["setting"]["sizes"] == "tiny"
    checks = {check["name"] for check in found["sections"]["self-test"]["checks"]}
    assert {"batched decode", "mixed adapters", "prefix cache", "training gradients"} <= checks
    names = [figure["name"] for figure in _figures(found, "decode")]
    assert names[:4] == ["1 row, base", "1 row, one adapter", "4 rows, base", "4 rows, one adapter"]
    counts = {"decode": 12, "prefill": 4, "adapters": 3, "update": 1, "live": 1}
    assert {section: len(_figures(found, section)) for section in counts} == counts
    for section in counts:
        for figure in _figures(found, section):
            assert min(figure["ours"], figure["other"]) > 1, figure
            assert figure["ratio"]["median"] == statistics.median(figure["rounds"]["ours"]) / figure["other"]
    assert found["sections"]["memory"]["facts"].keys() == {"ahead", "apart"}
    device = found["sections"]["device"]["facts"]
    assert device["read_bytes_per_s"] > 1e8
    assert 0 < device["launch_s"] < 1e-2
    assert list(device["products_s"]) == ["1", "2", "3", "4", "6", "8", "12", "16", "24", "32"]
    assert (
        device["attention"]["dense"].keys()
        == device["attention"]["by_blocks"].keys()
        == {"1 x 500", "4 x 500", "8 x 500"}
    )
    assert all(section["state"]["active_bytes"] >= 0 for section in found["sections"].values())
    assert model not in file.read_text()
    assert "8 rows, 8 adapters" in capsys.readouterr().out


def _figures(found: dict[str, Any], section: str) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = found["sections"][section]["figures"]
    return figures


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_budget_that_is_too_short_cuts_and_does_not_fail(file, model, monkeypatch):
    monkeypatch.setattr("mlx_parallm.cli.bench._MINUTES", 0.5)
    status, found = report(file, model)
    assert status == 0
    assert "cut" in statuses(found).values()
