"""`mlx_parallm launch` with a stand-in for the agent and a real server: what it asks, learns and leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from main_job.serving import Server, free_port, in_thread
from stand_in_agent import INTERRUPTED, SETTINGS, given, install
from tiny import save_tiny

pytestmark = pytest.mark.ci

LIMIT_S = 100
TRAINING = ("--enable-rl-training", "--lora-rank", "4", "--lora-alpha", "8")
EXECUTABLES = {"claude-code": "claude", "codex": "codex"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny("llama", path)
    return path


@pytest.fixture
def url() -> str:
    """Nothing answers there."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def training(model: Path, tmp_path: Path) -> Iterator[Server]:
    with in_thread("--model-path", str(model), "--checkpoint-dir", str(tmp_path / "run"), *TRAINING) as running:
        yield running


def launch(folder: Path, agent: str, *flags: str, **plan: object) -> subprocess.Popen[bytes]:
    """Leads a process group, as a command of a shell does. Its standard input is not a terminal."""
    variables = install(folder, EXECUTABLES[agent], **plan)
    command = (sys.executable, "-m", "mlx_parallm", "launch", agent, *flags)
    return subprocess.Popen(
        command, env=os.environ | variables, cwd=folder, stdin=subprocess.DEVNULL, start_new_session=True
    )


def runs(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.NetworkError:  # a server that is killed resets the connection
        return False


def wait_until_gone(url: str) -> None:
    until = time.monotonic() + LIMIT_S
    while runs(url):
        assert time.monotonic() < until
        time.sleep(0.05)


def check_settings(folder: Path) -> None:
    """Those of the user are as they were, and there are no others."""
    home = folder / "home"
    found = {str(path.relative_to(home)): path.read_text() for path in home.rglob("*") if path.is_file()}
    assert found == SETTINGS


@pytest.mark.parametrize("agent", EXECUTABLES)
def test_a_server_starts_and_ends_with_the_agent(model: Path, url: str, tmp_path: Path, agent: str) -> None:
    flags = ("--url", url, "--api-key", "s3cret", "--model-path", str(model), "--", "--url", "x")
    assert launch(tmp_path, agent, *flags, turns=2, status=3).wait(LIMIT_S) == 3
    assert given(tmp_path)["arguments"][-2:] == ["--url", "x"]
    assert "s3cret" not in " ".join(given(tmp_path)["arguments"])
    assert not runs(url)
    check_settings(tmp_path)


@pytest.mark.parametrize(
    ("number", "to_group", "status"),
    [(signal.SIGINT, True, INTERRUPTED), (signal.SIGTERM, False, 128 + 15), (signal.SIGKILL, False, -9)],
)
def test_a_signal_leaves_no_server_behind(
    model: Path, url: str, tmp_path: Path, number: int, to_group: bool, status: int
) -> None:
    """Ctrl-C goes to all processes of the terminal, and the agent decides what it does. SIGTERM ends both."""
    launched = launch(tmp_path, "codex", "--url", url, "--model-path", str(model), turns=1, waits=True)
    until = time.monotonic() + LIMIT_S
    while not (tmp_path / "record.json").exists():
        assert launched.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    assert runs(url)
    (os.killpg if to_group else os.kill)(launched.pid, number)
    assert launched.wait(LIMIT_S) == status
    wait_until_gone(url)
    if number == signal.SIGKILL:  # the agent lives on, as under any shell that is killed
        os.killpg(launched.pid, signal.SIGTERM)


def test_a_server_that_cannot_start_says_why(url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launched = launch(tmp_path, "codex", "--url", url, "--model-path", str(tmp_path / "none"))
    assert launched.wait(LIMIT_S) == 1
    error = capfd.readouterr().err
    assert "the server did not start" in error
    assert str(tmp_path / "none") in error
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize("agent", EXECUTABLES)
def test_launches_are_episodes_of_a_group_of_a_server_that_runs(training: Server, tmp_path: Path, agent: str) -> None:
    learn = ("--url", training.url, "--learn", "task", "--group-size", "2")
    for command in ("test -e record.json", "test -e nothing"):
        assert launch(tmp_path, agent, *learn, "--reward-command", command, turns=2).wait(LIMIT_S) == 0
    assert training.get("/health")
    (listed,) = training.get("/v1/training/trajectories")["data"]
    group = training.get(f"/v1/training/trajectories/{listed['group_id']}")
    assert [(member["reward"], len(member["turns"])) for member in group["members"]] == [(1.0, 2), (0.0, 2)]
    status = training.get("/v1/training/status")
    assert status["turns"] == {"first": 2, "continued": 2}
    assert (status["groups_open"], status["groups_ready"]) == (0, 1)
    check_settings(tmp_path)
