"""Claude Code 2.1.330 and Codex CLI 0.169, unmodified, by `mlx_parallm launch`: requests of full size to a tiny random
model become an episode, and the bundled model learns from the exit codes of a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import pytest
from clients.agents import LIMIT_S, installed, serving_long_context, work_folder
from clients.running import Report, asking_no_other_host
from main_job.serving import Server, start, stop

pytestmark = pytest.mark.timeout(1800)

OTHER = "http://127.0.0.1:1"
"""Nobody answers there."""
AGENTS = {
    "claude-code": ("claude_code", "claude", ("-p", "Say hello.")),
    "codex": ("codex", "codex", ("exec", "--skip-git-repo-check", "Say hello.")),
}
SETTINGS = {
    ".claude/settings.json": f'{{"env": {{"ANTHROPIC_BASE_URL": "{OTHER}", "ANTHROPIC_AUTH_TOKEN": "other"}}}}\n',
    ".codex/config.toml": f"""
model_provider = "other"
check_for_update_on_startup = false
analytics.enabled = false
features.plugins = false

[model_providers.other]
name = "Other"
base_url = "{OTHER}/v1"
""",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    flags = ("--enable-rl-training", "--checkpoint-dir", str(folder / "run"))
    with serving_long_context(folder, *flags) as running:
        yield running


@pytest.mark.parametrize("agent", AGENTS)
def test_a_session_is_an_episode(server: Server, tmp_path: Path, agent: str) -> None:
    """The user's settings are for another server, and stay as they are."""
    package, executable, arguments = AGENTS[agent]
    path = f"{Path(installed(package, executable)).parent}{os.pathsep}{os.environ['PATH']}"
    for name, text in SETTINGS.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    learn = ("--learn", agent, "--group-size", "2", "--reward-command", "true")
    command = (sys.executable, "-m", "mlx_parallm", "launch", agent, "--url", server.url, *learn, "--", *arguments)
    with asking_no_other_host() as proxied:
        subprocess.run(
            command,
            cwd=work_folder(tmp_path),
            env=os.environ | proxied | {"HOME": str(tmp_path), "PATH": path},
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=True,
        )
    (member,) = server.get(f"/v1/training/trajectories/{agent}")["members"]
    assert (member["reward"], len(member["turns"])) == (1.0, 1)
    assert {name: (tmp_path / name).read_text() for name in SETTINGS} == SETTINGS


GROUPS, ATTEMPTS = 8, 8
LEAST_GAIN = 0.3
SHORT = ("--tools", "", "--system-prompt", "You answer.", "--setting-sources", "", "--strict-mcp-config")
"""What fits the bundled model's context."""
ANSWER, MOST_BYTES = "answer.txt", 30


def wait_until_learnt(server: Server) -> None:
    """Training gets all of the time while nobody asks anything."""
    until = time.monotonic() + LIMIT_S
    while (status := server.get("/v1/training/status"))["groups_ready"] or status["state"] == "updating":
        assert time.monotonic() < until, status
        time.sleep(0.5)


def test_the_bundled_model_learns_from_exit_codes(tmp_path: Path, report: Report) -> None:
    """Attempts at one task are a group. The agent prints an answer, and a command looks whether it is short."""
    path = f"{Path(installed('claude_code', 'claude')).parent}{os.pathsep}{os.environ['PATH']}"
    flags = ("--checkpoint-dir", str(tmp_path / "run"), "--update-frequency", str(ATTEMPTS), "--learning-rate", "1e-3")
    server = start("--enable-rl-training", *flags)

    def attempt(group: str, number: int) -> float:
        folder = tmp_path / group / str(number)
        folder.mkdir(parents=True)
        reward = ("--reward-command", f'test "$(wc -c < {ANSWER})" -le {MOST_BYTES}')
        learn = ("--learn", group, "--group-size", str(ATTEMPTS), *reward)
        command = (sys.executable, "-m", "mlx_parallm", "launch", "claude-code", "--url", server.url, *learn)
        home = {
            "HOME": str(folder),
            "PATH": path,
            "CLAUDE_CODE_EXTRA_BODY": json.dumps({"stop_sequences": [".", "\n"]}),
        }
        asked = ("-p", "Name a colour, in one word.")
        with (folder / ANSWER).open("w") as answer:
            variables = os.environ | proxied | home
            subprocess.run((*command, "--", *SHORT, *asked), cwd=folder, env=variables, stdout=answer, timeout=LIMIT_S)
        return float((folder / ANSWER).stat().st_size <= MOST_BYTES)

    try:
        with asking_no_other_host() as proxied, ThreadPoolExecutor(ATTEMPTS) as attempts:
            rewards = []
            for number in range(GROUPS):
                group = [f"colour-{number}"] * ATTEMPTS
                rewards.append(fmean(attempts.map(attempt, group, range(ATTEMPTS))))
                wait_until_learnt(server)
    finally:
        stop(server)
    first, last = fmean(rewards[:2]), fmean(rewards[-2:])
    report("launch: reward of the first two groups of 8 sessions of Claude Code", first)
    report("launch: reward of the last two of 8", last, limit=first + LEAST_GAIN, at_least=True)
    assert last >= first + LEAST_GAIN, rewards
