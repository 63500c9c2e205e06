"""`mlx_parallm service install`, `uninstall` and `status`."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from mlx_parallm.cli.parser import argument, subcommands, takes
from mlx_parallm.cli.show import JSON, show
from mlx_parallm.extras_table import needed

_FOLDER = Path("~/.mlx_parallm")


@takes(
    argument("--config", type=Path, metavar="FILE", help="Its configuration. Default: the defaults."),
    argument(
        "--working-directory",
        type=Path,
        default=_FOLDER,
        metavar="DIR",
        help=f"The folder that it runs in. Default: {_FOLDER}.",
    ),
    argument(
        "--dry-run",
        action="store_true",
        help="Print the property list and change nothing. On Linux: a unit for systemd.",
    ),
)
def _install(args: Namespace) -> int:
    """Writes the property list and starts the server; in place of an earlier one.

    Raises:
        ConfigError: the server would not start with this configuration, or this is not macOS.
        ParaLLMError: see `extras.service.install`.
    """
    service = _extra()
    wanted = service.service_of(args.config, args.working_directory.expanduser().absolute())
    if args.dry_run:
        print(wanted.plist().decode() if sys.platform == "darwin" else wanted.unit(), end="")
        return 0
    service.check_mac()
    path = service.install(wanted)
    print(f"the server runs, and starts at each login; it logs to {wanted.log}\nthe service is in {path}")
    return 0


@takes()
def _uninstall(args: Namespace) -> int:
    """Stops the server and removes the property list. Logs, adapters and checkpoints stay."""
    service = _extra()
    service.check_mac()
    print("the service is removed" if service.uninstall() else "no service was installed")
    return 0


@takes(JSON)
def _status(args: Namespace) -> int:
    """Prints what launchd says about the service. The exit status is 0 if it runs, else 1."""
    service = _extra()
    service.check_mac()
    facts = service.facts()
    data = {"installed": service.plist_path().exists(), "loaded": facts is not None, **(facts or {})}
    lines = [f"{name:<10} {value}" for name, value in data.items()]
    show(args, data, "\n".join([*lines, "", "`mlx_parallm ps` asks the server itself"]))
    return 0 if facts is not None and facts.get("state") == "running" else 1


def _extra() -> Any:
    """The module of the extra. Raises ConfigError: it is not there."""
    return needed("service", "mlx_parallm service")


COMMANDS = subcommands(
    ("install", "Start a server at login, and again when it fails. On macOS, with launchd.", _install),
    ("uninstall", "Stop the server, and start it no more.", _uninstall),
    ("status", "Show whether the service is installed and running.", _status),
)
