"""What the service runs, as a property list for launchd (launchd.plist(5)) and as a unit for systemd.service(5)."""

from __future__ import annotations

import plistlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LABEL = "mlx-parallm.server"
"""The name of the service for launchd."""
UNIT = "mlx-parallm.service"
"""The name of the service for systemd."""
_RESTART_AFTER_S = 10
_STOP_MARGIN_S = 15
"""Time to exit after requests have had `server.shutdown_timeout` to finish."""


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

    @classmethod
    def of(
        cls, python: str, config: Path | None, folder: Path, log: Path, environment: Mapping[str, str], drain_s: float
    ) -> Service:
        """The service that runs `mlx_parallm serve` with a configuration file; None: with the defaults.

        Args:
            python: the interpreter of the environment in which this package is installed.
            drain_s: how long requests may take to finish after it is told to stop.
        """
        chosen = () if config is None else ("--config", str(config))
        command = (python, "-m", "mlx_parallm", "serve", *chosen)
        return cls(command, folder, log, environment, int(drain_s) + _STOP_MARGIN_S)

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
