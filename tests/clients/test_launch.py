"""Claude Code 2.1.330 and Codex CLI 0.169, unmodified, by `mlx_parallm launch`: requests of full size to a tiny random
model become an episode."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients.agents import LIMIT_S, installed, serving_long_context, work_folder
from clients.running import asking_no_other_host
from main_job.serving import Server

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
