"""`mlx_parallm service install`, `uninstall` and `status`."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from mlx_parallm.atomic import replace_file
from mlx_parallm.cli.parser import AddCommand
from mlx_parallm.cli.service import launchd
from mlx_parallm.cli.service.definition import UNIT, Service
from mlx_parallm.cli.table import add_json_argument, show
from mlx_parallm.config import API_KEY_VARIABLE, CLUSTER_TOKEN_VARIABLE, KEYS, resolve
from mlx_parallm.errors import ConfigError, StorageError

_FOLDER = Path("~/.mlx_parallm")
_LOG = Path("Library/Logs/mlx_parallm.log")
_OURS = "MLX_PARALLM_"
_OTHERS = ("HF_HOME", "HF_ENDPOINT")
"""Variables of the model hub that the service gets too."""
_TEMPORARY = frozenset({"archive-v0", "environments-v2"})
"""Folders of uv's cache in which `uvx` and `uv run --with` make environments that uv may remove at any time."""


def add_commands(add: AddCommand) -> None:
    """Adds the commands."""
    installing = add("install", "Start a server at login, and again when it fails. On macOS, with launchd.")
    installing.add_argument("--config", type=Path, metavar="FILE", help="Its configuration. Default: the defaults.")
    where = f"The folder that it runs in. Default: {_FOLDER}."
    installing.add_argument("--working-directory", type=Path, default=_FOLDER, metavar="DIR", help=where)
    dry = "Print the property list and change nothing. On Linux: a unit for systemd."
    installing.add_argument("--dry-run", action="store_true", help=dry)
    installing.set_defaults(run=install)
    add("uninstall", "Stop the server, and start it no more.").set_defaults(run=uninstall)
    status = add("status", "Show whether the service is installed and running.")
    add_json_argument(status)
    status.set_defaults(run=show_status)


def install(args: Namespace) -> int:
    """Writes the property list and starts the server; in place of an earlier one.

    Raises:
        ConfigError: the server would not start with this configuration, or this is not macOS.
        StorageError: the file cannot be written.
    """
    service = _service(args.config, args.working_directory.expanduser().absolute())
    mac = sys.platform == "darwin"
    if args.dry_run:
        print(service.plist().decode() if mac else service.unit(), end="")
        return 0
    _check_mac()
    path = launchd.plist_path()
    try:
        for folder in (service.folder, service.log.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, service.plist(), mode=0o644)
    except OSError as error:
        raise StorageError(f"{error.filename}: {error.strerror}; the service is as before") from error
    launchd.unload()
    launchd.load(path)
    print(f"the server runs, and starts at each login; it logs to {service.log}\nthe service is in {path}")
    return 0


def uninstall(args: Namespace) -> int:
    """Stops the server and removes the property list. Logs, adapters and checkpoints stay."""
    _check_mac()
    path = launchd.plist_path()
    stopped, known = launchd.unload(), path.exists()
    path.unlink(missing_ok=True)
    print("the service is removed" if stopped or known else "no service was installed")
    return 0


def show_status(args: Namespace) -> int:
    """Prints what launchd says about the service. The exit status is 0 if it runs, else 1."""
    _check_mac()
    path, facts = launchd.plist_path(), launchd.facts()
    data = {"installed": path.exists(), "loaded": facts is not None, **(facts or {})}
    lines = [f"{name:<10} {value}" for name, value in data.items()]
    show(args, data, lambda: "\n".join([*lines, "", "`mlx_parallm ps` asks the server itself"]))
    return 0 if facts is not None and facts.get("state") == "running" else 1


def _check_mac() -> None:
    if sys.platform != "darwin":
        raise ConfigError(
            "the commands of `mlx_parallm service` are for launchd, which is macOS's. On Linux, write what "
            f"`mlx_parallm service install --dry-run` prints to ~/.config/systemd/user/{UNIT}, and run "
            f"`systemctl --user enable --now {UNIT}`"
        )


def _service(config: Path | None, folder: Path) -> Service:
    """The service with this configuration, which is checked.

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
    settings = resolve({}, variables, file).config
    return Service.of(
        sys.executable, file, folder, Path.home() / _LOG, variables, drain_s=settings.server.shutdown_timeout
    )


def _belongs(name: str) -> bool:
    return (name.startswith(_OURS) or name in _OTHERS) and bool(os.environ[name])


def _check_secrets(variables: Mapping[str, str]) -> None:
    secret = {API_KEY_VARIABLE, CLUSTER_TOKEN_VARIABLE, *(key.env_name for key in KEYS.values() if key.secret)}
    if found := sorted(secret & variables.keys()):
        raise ConfigError(
            f"{found[0]} is set, and the service's file would show it: unset it, make a key with `mlx_parallm keys "
            "add`, and name its file in the configuration, as server.keys_file"
        )
