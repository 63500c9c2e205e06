"""A server that the system starts at login and keeps running: what it runs, as a property list for launchd
(launchd.plist(5)) and as a unit for systemd.service(5), and what launchd is asked, through launchctl(1)."""

from __future__ import annotations

import os
import plistlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.atomic import replace_file
from mlx_parallm.config import API_KEY_VARIABLE, CLUSTER_TOKEN_VARIABLE, KEYS, resolve
from mlx_parallm.errors import ConfigError, ParaLLMError, StorageError

LABEL = "mlx-parallm.server"
"""The name of the service for launchd."""
UNIT = "mlx-parallm.service"
"""The name of the service for systemd."""
_RESTART_AFTER_S = 10
_STOP_MARGIN_S = 15
"""Time to exit after requests have had `server.shutdown_timeout` to finish."""
_LOG = Path("Library/Logs/mlx_parallm.log")
_OURS = "MLX_PARALLM_"
_OTHERS = ("HF_HOME", "HF_ENDPOINT")
"""Variables of the model hub that the service gets too."""
_TEMPORARY = frozenset({"archive-v0", "environments-v2"})
"""Folders of uv's cache in which `uvx` and `uv run --with` make environments that uv may remove at any time."""
_FACTS = {"state": r"^\s*state = (.+)$", "pid": r"^\s*pid = (\d+)$", "last exit": r"^\s*last exit code = (.+)$"}


@dataclass(frozen=True, slots=True)
class Service:
    """A server without a terminal.

    Attributes:
        command: the program and its arguments, with absolute paths.
        folder: where it runs. Relative paths in its configuration begin there.
        log: the file for all that it prints.
        environment: variables that it gets. They are readable in the file, so no secret is among them.
        stop_s: seconds that it may take to stop.
    """

    command: Sequence[str]
    folder: Path
    log: Path
    environment: Mapping[str, str]
    stop_s: int

    def plist(self) -> bytes:
        """The property list. launchd starts the server at login, and again 10 seconds after it has failed, but not
        after it was stopped."""
        content: dict[str, Any] = {
            "Label": LABEL,
            "ProgramArguments": list(self.command),
            "WorkingDirectory": str(self.folder),
            "EnvironmentVariables": dict(self.environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _RESTART_AFTER_S,
            "ExitTimeOut": self.stop_s,
            "ProcessType": "Interactive",  # else macOS slows it down as it does with background work
            "StandardOutPath": str(self.log),
            "StandardErrorPath": str(self.log),
        }
        return plistlib.dumps(content, sort_keys=False)

    def unit(self) -> str:
        """The unit. systemd keeps what the server prints in its journal."""
        variables = "".join(f"Environment={_quoted(f'{name}={value}')}\n" for name, value in self.environment.items())
        return (
            "[Unit]\n"
            "Description=MLX ParaLLM: an OpenAI-compatible server that trains while it serves\n"
            "\n"
            "[Service]\n"
            f"ExecStart={' '.join(map(_argument, self.command))}\n"
            f"WorkingDirectory={_escaped(str(self.folder))}\n"
            f"{variables}"
            "KillMode=mixed\n"  # the server itself ends its children, when requests have ended
            "Restart=on-failure\n"
            f"RestartSec={_RESTART_AFTER_S}\n"
            f"TimeoutStopSec={self.stop_s}\n"
            "\n"
            "[Install]\n"
            "WantedBy=default.target\n"
        )


def _argument(text: str) -> str:
    """One argument of ExecStart, where `$` begins a variable."""
    return _quoted(text.replace("$", "$$"))


def _quoted(text: str) -> str:
    """A word that systemd unquotes as C does."""
    escaped = _escaped(text)
    if not set(" \t\"'\\;") & set(text):
        return escaped
    return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped(text: str) -> str:
    """`%` begins a specifier, which systemd would expand."""
    return text.replace("%", "%%")


def service_of(config: Path | None, folder: Path) -> Service:
    """The service of this environment and its variables, with a configuration file, which is checked; None: with the
    defaults.

    Raises:
        ConfigError: a setting is wrong, a variable has a secret, or the environment of this program does not last.
    """
    if _TEMPORARY & set(Path(sys.prefix).parts):
        raise ConfigError(
            "this program runs in a temporary environment, which uv may remove: install it first, for example with "
            "`uv tool install`, and run the installed `mlx_parallm service install`"
        )
    variables = {name: os.environ[name] for name in sorted(os.environ) if _belongs(name)}
    _check_secrets(variables)
    file = config.expanduser().absolute() if config else None
    drain_s = resolve({}, variables, file).config.server.shutdown_timeout
    chosen = () if file is None else ("--config", str(file))
    command = (sys.executable, "-m", "mlx_parallm", "serve", *chosen)
    return Service(command, folder, Path.home() / _LOG, variables, int(drain_s) + _STOP_MARGIN_S)


def _belongs(name: str) -> bool:
    return (name.startswith(_OURS) or name in _OTHERS) and bool(os.environ[name])


def _check_secrets(variables: Mapping[str, str]) -> None:
    secret = {API_KEY_VARIABLE, CLUSTER_TOKEN_VARIABLE, *(key.env_name for key in KEYS.values() if key.secret)}
    if found := sorted(secret & variables.keys()):
        raise ConfigError(
            f"{found[0]} is set, and the service's file would show it: unset it, make a key with `mlx_parallm keys "
            "add`, and name its file in the configuration, as server.keys_file"
        )


# -- launchd ---------------------------------------------------------------------------------------


def check_mac() -> None:
    """Raises ConfigError on another system, with what to do there."""
    if sys.platform != "darwin":
        raise ConfigError(
            "the commands of `mlx_parallm service` are for launchd, which is macOS's. On Linux, write what "
            f"`mlx_parallm service install --dry-run` prints to ~/.config/systemd/user/{UNIT}, and run "
            f"`systemctl --user enable --now {UNIT}`"
        )


def install(service: Service) -> Path:
    """Writes the property list and starts the server; in place of an earlier one. Returns the file's path.

    Raises:
        StorageError: the file cannot be written.
        ParaLLMError: launchd refuses it.
    """
    path = plist_path()
    try:
        for folder in (service.folder, service.log.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, service.plist(), mode=0o644)
    except OSError as error:
        raise StorageError(f"{error.filename}: {error.strerror}; the service is as before") from error
    _unload()
    done = _launchctl("bootstrap", _domain(), str(path))
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise ParaLLMError(f"launchctl cannot start the service: {said}; the file is {path}")
    return path


def uninstall() -> bool:
    """Stops the server and removes the property list. Logs, adapters and checkpoints stay. False if there was none."""
    path = plist_path()
    stopped, known = _unload(), path.exists()
    path.unlink(missing_ok=True)
    return stopped or known


def facts() -> dict[str, str] | None:
    """What launchd says about the service: its state, its process and how it last ended. None: it does not know it."""
    done = _launchctl("print", f"{_domain()}/{LABEL}")
    if done.returncode:
        return None
    found = {name: re.search(pattern, done.stdout, re.MULTILINE) for name, pattern in _FACTS.items()}
    return {name: match[1] for name, match in found.items() if match}


def plist_path() -> Path:
    """Where launchd finds the user's services at login."""
    return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"


def _unload() -> bool:
    """Stops the service, and waits until it has stopped. False if launchd does not know it."""
    return _launchctl("bootout", f"{_domain()}/{LABEL}").returncode == 0


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _launchctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["launchctl", *arguments], capture_output=True, text=True, check=False)
