"""Asks launchd about the user's services, through launchctl(1)."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from mlx_parallm.cli.service.definition import LABEL
from mlx_parallm.errors import ParaLLMError

_FACTS = {"state": r"^\s*state = (.+)$", "pid": r"^\s*pid = (\d+)$", "last exit": r"^\s*last exit code = (.+)$"}


def plist_path() -> Path:
    """Where launchd finds the user's services at login."""
    return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"


def load(plist: Path) -> None:
    """Starts a service, now and at each login. Raises ParaLLMError: launchd refuses it."""
    done = _launchctl("bootstrap", _domain(), str(plist))
    if done.returncode:
        raise ParaLLMError(f"launchctl cannot start the service: {_said(done)}; the file is {plist}")


def unload() -> bool:
    """Stops the service, and waits until it has stopped. False if launchd does not know it."""
    return _launchctl("bootout", _target()).returncode == 0


def facts() -> dict[str, str] | None:
    """What launchd says about the service: its state, its process and how it last ended. None: it does not know it."""
    done = _launchctl("print", _target())
    if done.returncode:
        return None
    found = {name: re.search(pattern, done.stdout, re.MULTILINE) for name, pattern in _FACTS.items()}
    return {name: match[1] for name, match in found.items() if match}


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _target() -> str:
    return f"{_domain()}/{LABEL}"


def _launchctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["launchctl", *arguments], capture_output=True, text=True, check=False)


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
