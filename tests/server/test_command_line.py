"""The command line that started the server, as the dashboard shows it with one flag more."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from mlx_parallm.cli.flags import FLAGS
from mlx_parallm.server.command_line import command_line

UV_RUN = {"UV": "/usr/bin/uv", "UV_RUN_RECURSION_DEPTH": "1"}


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the PATH with the three scripts and a Python."""
    for name in ("mlx_parallm_serve", "mlx_parallm", "python"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_it_begins_as_it_was_begun(scripts: Path) -> None:
    serve = str(scripts / "mlx_parallm_serve")
    port = ["--port", "8021"]
    assert command_line([serve, *port], environ={}) == "mlx_parallm_serve --port 8021"
    assert command_line([serve, *port], environ=UV_RUN) == "uv run mlx_parallm_serve --port 8021"
    assert command_line([str(scripts / "mlx_parallm"), "serve"], environ={"UV": "uv"}) == "uvx mlx_parallm serve"
    assert command_line([".venv/bin/mlx_parallm_serve", *port], environ={}) == ".venv/bin/mlx_parallm_serve --port 8021"
    main = "/lib/mlx_parallm/__main__.py"
    assert command_line([main, "serve"], "python3.11", {}) == "python3.11 -m mlx_parallm serve"
    assert command_line([main, "serve"], str(scripts / "python"), UV_RUN) == "uv run python -m mlx_parallm serve"


def test_arguments_are_quoted_for_a_shell(scripts: Path) -> None:
    given = ["--served-model-name", "my model", "--teacher-prompt", "it's"]
    said = command_line([str(scripts / "mlx_parallm_serve"), *given], environ={})
    assert shlex.split(said) == ["mlx_parallm_serve", *given]


@pytest.mark.parametrize("program", ["/usr/bin/pytest", "notebook.py", "/lib/pytest/__main__.py", ""])
def test_of_another_program_nothing_is_said(program: str) -> None:
    assert command_line([program, "--port", "1"], environ={}) == ""


def test_secrets_are_masked(scripts: Path) -> None:
    flags = [name for name, key in FLAGS.items() if key.secret]
    assert {"--api-key", "--cluster-token", "--ssl-keyfile-password", "--rl_training.judge.api_key"} <= {*flags}
    given = [word for flag in flags for word in (flag, "hunter2", f"{flag}=hunter2")]
    said = command_line([str(scripts / "mlx_parallm_serve"), *given, "--port", "1"], environ={})
    assert "hunter2" not in said
    assert said.endswith("--port 1")
    assert shlex.split(said)[1:3] == [flags[0], "***"]


def test_what_is_no_secret_is_not_masked(scripts: Path) -> None:
    shown = [word for name, key in FLAGS.items() if not key.secret for word in (name, "seen")]
    said = command_line([str(scripts / "mlx_parallm_serve"), *shown], environ={})
    assert shlex.split(said) == ["mlx_parallm_serve", *shown]


def test_the_password_of_a_url_is_masked(scripts: Path) -> None:
    given = ["--nats-url=nats://me:hunter2@host:4222", "--judge-url", "https://host/v1"]
    said = command_line([str(scripts / "mlx_parallm_serve"), *given], environ={})
    assert shlex.split(said)[1:] == ["--nats-url=nats://***@host:4222", "--judge-url", "https://host/v1"]
