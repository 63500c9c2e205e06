"""`mlx_parallm service`: the property list, the unit for systemd, and what launchctl is asked."""

import json
import os
import plistlib
import stat
import sys
from pathlib import Path

import pytest

from mlx_parallm.cli.main import main
from mlx_parallm.extras.service import LABEL, Service

PRINTED = f"""{LABEL} = {{
\tactive count = 1
\tpath = /Users/someone/Library/LaunchAgents/{LABEL}.plist
\tstate = running

\tprogram = /opt/python
\tpid = 4711
\tlast exit code = (never exited)
}}
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def mac(home, monkeypatch):
    """A Mac whose launchctl notes what it is asked, and answers by `answers/<subcommand>` (default: success)."""
    monkeypatch.setattr(sys, "platform", "darwin")
    tools = home / "tools"
    tools.mkdir()
    launchctl = tools / "launchctl"
    launchctl.write_text(
        f'#!/bin/sh\necho "$@" >> {home}/asked\n'
        f'[ -f {home}/"$1" ] || exit 0\ncat {home}/"$1"\nexit $(cat {home}/"$1".status 2>/dev/null || echo 0)\n'
    )
    launchctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return home


def asked(home):
    return (home / "asked").read_text().splitlines()


def plist_of(home):
    return plistlib.loads((home / f"Library/LaunchAgents/{LABEL}.plist").read_bytes())


def test_the_property_list_says_all_that_launchd_needs(mac, tmp_path, capsys, monkeypatch):
    config = tmp_path / "a folder" / "my server.yaml"
    config.parent.mkdir()
    config.write_text("server:\n  shutdown_timeout: 60\n")
    monkeypatch.setenv("MLX_PARALLM_SERVER__PORT", "8001")
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("UNRELATED", "x")
    assert main(["service", "install", "--dry-run", "--config", str(config)]) == 0
    found = plistlib.loads(capsys.readouterr().out.encode())
    assert found == {
        "Label": LABEL,
        "ProgramArguments": [sys.executable, "-m", "mlx_parallm", "serve", "--config", str(config)],
        "WorkingDirectory": str(mac / ".mlx_parallm"),
        "EnvironmentVariables": {"HF_HOME": "/models", "MLX_PARALLM_SERVER__PORT": "8001"},
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": 75,
        "ProcessType": "Interactive",
        "StandardOutPath": str(mac / "Library/Logs/mlx_parallm.log"),
        "StandardErrorPath": str(mac / "Library/Logs/mlx_parallm.log"),
    }
    assert not (mac / "asked").exists()
    assert not (mac / "Library").exists()


def test_install_replaces_an_earlier_service_and_starts_it(mac, capsys):
    assert main(["service", "install"]) == 0
    path = mac / f"Library/LaunchAgents/{LABEL}.plist"
    domain = f"gui/{os.getuid()}"
    assert asked(mac) == [f"bootout {domain}/{LABEL}", f"bootstrap {domain} {path}"]
    assert plist_of(mac)["ProgramArguments"][-1] == "serve"
    assert not stat.S_IMODE(path.stat().st_mode) & 0o022, "launchd refuses files that others can write"
    assert (mac / ".mlx_parallm").is_dir()
    assert str(path) in capsys.readouterr().out


def test_what_launchd_says_when_it_refuses(mac, capsys):
    (mac / "bootstrap").write_text("Bootstrap failed: 5: Input/output error\n")
    (mac / "bootstrap.status").write_text("5")
    assert main(["service", "install"]) == 1
    assert "Bootstrap failed: 5" in capsys.readouterr().err


def test_status_and_uninstall(mac, capsys):
    (mac / "print").write_text(PRINTED)
    assert main(["service", "install"]) == 0
    capsys.readouterr()
    assert main(["service", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "installed": True,
        "loaded": True,
        "state": "running",
        "pid": "4711",
        "last exit": "(never exited)",
    }
    assert main(["service", "uninstall"]) == 0
    assert "removed" in capsys.readouterr().out
    assert not (mac / f"Library/LaunchAgents/{LABEL}.plist").exists()


def test_a_secret_is_not_written_to_the_file(mac, capsys, monkeypatch):
    monkeypatch.setenv("MLX_PARALLM_API_KEY", "hidden")
    assert main(["service", "install", "--dry-run"]) == 2
    said = capsys.readouterr()
    assert "mlx_parallm keys add" in said.err
    assert "hidden" not in said.err + said.out


def test_a_temporary_environment_is_refused(mac, monkeypatch, capsys):
    monkeypatch.setattr(sys, "prefix", "/Users/someone/.cache/uv/archive-v0/abc")
    assert main(["service", "install"]) == 2
    assert "uv tool install" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["install"], ["uninstall"], ["status"]])
def test_on_linux_the_error_says_what_to_do(command, home, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    assert main(["service", *command]) == 2
    said = capsys.readouterr().err
    assert "mlx_parallm service install --dry-run" in said
    assert "systemctl --user enable --now mlx-parallm.service" in said
    assert list(home.iterdir()) == []


def test_on_linux_a_dry_run_prints_a_unit(home, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("MLX_PARALLM_SERVER__PORT", "8001")
    assert main(["service", "install", "--dry-run"]) == 0
    unit = capsys.readouterr().out
    assert f"ExecStart={sys.executable} -m mlx_parallm serve\n" in unit
    assert "Environment=MLX_PARALLM_SERVER__PORT=8001\n" in unit
    assert f"WorkingDirectory={home}/.mlx_parallm\n" in unit
    assert "TimeoutStopSec=45\n" in unit


def test_the_unit_quotes_what_systemd_would_expand():
    command = ("/usr/bin/python", "-m", "mlx_parallm", "serve", "--config", "/a b/100% $HOME.yaml")
    service = Service(command, Path("/data"), Path("/log"), {"NAME": 'say "$x"'}, 45)
    unit = service.unit()
    assert 'serve --config "/a b/100%% $$HOME.yaml"\n' in unit
    assert 'Environment="NAME=say \\"$x\\""\n' in unit
