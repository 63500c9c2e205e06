"""Tinker's SDK, unmodified: the last release that writes JSON, and the current one, which writes protobuf.

The server needs the extra `tinker` for the current one: without it, those tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from clients.running import ENVIRONMENT, PYTHON, SCRIPTS, UV, Report, printed, wait_until_idle
from main_job.serving import SERVED, Server, start, stop
from tiny import save_tiny

pytestmark = pytest.mark.timeout(900)

TIMEOUT_S = 12
WITH_PROTOBUF = pytest.mark.skipif(importlib.util.find_spec("tinker") is None, reason="the extra tinker is missing")
SDKS = ["tinker==0.24.1", pytest.param("tinker==0.38.0", marks=WITH_PROTOBUF)]


def sdk(requirement: str) -> list[str]:
    """The Python of an environment with this release. TINKER_PYTHON_0_24_1 and the like may name one that is there."""
    there = os.environ.get("TINKER_PYTHON_" + requirement.partition("==")[2].replace(".", "_"))
    return [there] if there else [*UV, "run", "--no-project", *PYTHON, "--with", requirement, "python"]


def asked(requirement: str, server: Server, model: str, *parts: str) -> dict[str, Any]:
    said = printed(*sdk(requirement), str(SCRIPTS / "with_tinker.py"), server.url, model, *parts)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that trains a tiny model; at the end nothing may be left in it."""
    folder = tmp_path_factory.mktemp("tinker")
    save_tiny("llama", folder / "tiny")
    settings = folder / "settings.yaml"
    settings.write_text(f"rl_training:\n  tinker:\n    session_timeout_s: {TIMEOUT_S}\n    max_models: 16\n")
    flags = ("--enable-rl-training", "--max-lora-rank", "32", "--kv-cache-memory", "64MB", "--debug")
    at = ("--model-path", str(folder / "tiny"), "--checkpoint-dir", str(folder / "run"), "--config", str(settings))
    running = start(*flags, *at)
    yield running
    wait_for(running, lambda: not running.get("/api/v1/sessions")["sessions"])
    wait_until_idle(running)
    stop(running)


def wait_for(server: Server, true: Any) -> None:
    until = time.monotonic() + 6 * TIMEOUT_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.5)


def furthest(found: dict[str, Any]) -> float:
    """The largest difference between the logprobs of `sample` and those of the other calls, for the same tokens."""
    others = [found[other] for other in ("forward", "backward", "computed")]
    return max(abs(a - b) for other in others for a, b in zip(found["sampled"], other, strict=True))


@pytest.mark.parametrize("requirement", SDKS)
def test_a_supervised_run(tiny: Server, requirement: str, report: Report) -> None:
    found = asked(requirement, tiny, "tiny", "supervised")["supervised"]
    ratio = found["losses"][-1] / found["losses"][0]
    report(f"{requirement} (tiny): loss after 7 supervised updates / before", ratio, limit=0.5)
    assert ratio < 0.5
    assert found["ahead"][0] == pytest.approx(found["ahead"][1], rel=1e-6)
    assert found["rank"] == 4


@pytest.mark.parametrize("requirement", SDKS)
def test_logprobs_agree(tiny: Server, requirement: str, report: Report) -> None:
    found = asked(requirement, tiny, "tiny", "agree")["agree"]
    assert found["first"] is None
    report(f"{requirement} (tiny): logprobs of sample and forward, x 1e-6", 1e6 * furthest(found), limit=10)
    assert furthest(found) < 1e-5


@pytest.mark.parametrize("requirement", SDKS)
def test_a_reinforced_run(tiny: Server, requirement: str, report: Report) -> None:
    means = asked(requirement, tiny, "tiny", "reinforced")["reinforced"]
    gain = fmean(means[-3:]) - fmean(means[:3])
    report(f"{requirement} (tiny): gain of the last three of 12 reinforced updates", gain, limit=0.1, at_least=True)
    assert gain >= 0.1, means


@pytest.mark.parametrize("requirement", SDKS)
def test_two_clients_at_once(tiny: Server, requirement: str, report: Report) -> None:
    found = asked(requirement, tiny, "tiny", "two")["two"]
    ratios = [
        together / alone
        for seed in ("1", "2")
        for together, alone in zip(found["together"][seed], found["alone"][seed], strict=True)
    ]
    apart = max(abs(ratio - 1) for ratio in ratios)
    report(f"{requirement} (tiny): losses of two clients at once against one by one, x 1e-6", 1e6 * apart, limit=100)
    assert apart < 1e-4


@pytest.mark.parametrize("requirement", SDKS)
def test_a_thousand_futures(tiny: Server, requirement: str, report: Report) -> None:
    found = asked(requirement, tiny, "tiny", "many")["many"]
    report(f"{requirement} (tiny): 1,000 futures at once", found["seconds"], "s")
    assert found["done"] == 1000


@pytest.mark.parametrize("requirement", SDKS)
def test_a_killed_client_leaves_nothing_behind(tiny: Server, requirement: str) -> None:
    command = [*sdk(requirement), str(SCRIPTS / "with_tinker.py"), tiny.url, "tiny", "killed"]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, timeout=300)
    assert done.returncode in (-9, 137), done.stderr
    assert tiny.get("/api/v1/training_runs")["training_runs"]
    wait_for(tiny, lambda: not tiny.get("/api/v1/sessions")["sessions"])
    assert not tiny.get("/api/v1/training_runs")["training_runs"]
    assert asked(requirement, tiny, "tiny", "supervised")


@pytest.mark.parametrize("requirement", SDKS)
def test_logprobs_agree_on_the_bundled_model(tmp_path: Path, requirement: str, report: Report) -> None:
    server = start("--enable-rl-training", "--checkpoint-dir", str(tmp_path / "run"))
    try:
        found = asked(requirement, server, SERVED, "agree")["agree"]
    finally:
        stop(server)
    report(f"{requirement}: logprobs of sample and forward, x 1e-6", 1e6 * furthest(found), limit=100)
    assert furthest(found) < 1e-4
