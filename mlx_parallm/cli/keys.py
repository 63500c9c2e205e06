"""`mlx_parallm keys`: adds, lists and removes the named keys of a file. A running server sees a change at once."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.cli.parser import argument, subcommands, takes
from mlx_parallm.cli.show import JSON, show, table
from mlx_parallm.config import KEYS
from mlx_parallm.errors import ConfigError

if TYPE_CHECKING:
    from mlx_parallm.server.access import NamedKey

_DEFAULT_FILE = Path("~/.mlx_parallm/keys.json")
_VARIABLE = KEYS["server.keys_file"].env_name
_ROLES = ("inference", "train", "admin")
_LIMITS = {
    "requests/min": "requests_per_minute",
    "tokens/min": "tokens_per_minute",
    "concurrent": "max_concurrent",
    "priority": "least_priority",
    "own cache": "own_prefix_cache",
    "adapters": "adapters",
}
"""Columns of the list, and the arguments of `keys add` that they show."""
_KEYS_FILE = f"The file of keys. Default: ${_VARIABLE}, else {_DEFAULT_FILE}."
_FILE = (argument("--keys-file", type=Path, metavar="FILE", help=_KEYS_FILE), JSON)


def _file(args: Namespace) -> Path:
    chosen: Path = args.keys_file or Path(os.environ.get(_VARIABLE) or _DEFAULT_FILE)
    return chosen.expanduser()


@takes(
    argument("name", metavar="NAME", help="Who uses it, such as laptop."),
    argument(
        "--role",
        choices=_ROLES,
        default="inference",
        help="What it may do. inference: ask the model. train: also teach, and load and publish adapters. admin: "
        "everything. Default: %(default)s.",
    ),
    argument("--requests-per-minute", type=int, metavar="N", help="Default: no limit."),
    argument("--tokens-per-minute", type=int, metavar="N", help="Of prompts and answers. Default: no limit."),
    argument("--max-concurrent", type=int, metavar="N", help="Requests under way. Default: no limit."),
    argument(
        "--least-priority", type=int, metavar="N", help="The lowest (most urgent) priority it may ask for. Default: 0."
    ),
    argument(
        "--adapters",
        type=lambda text: tuple(text.split(",")),
        metavar="PATTERNS",
        help="The only adapters that it may list, use, teach and change, such as 'acme*,base': * stands for any text, "
        "and base is the base model. All others are unknown to it. Default: all adapters.",
    ),
    argument("--own-prefix-cache", action="store_true", help="Cache its prompts apart from those of others."),
    *_FILE,
)
def _add(args: Namespace) -> int:
    """Makes a key, and prints it and how to use it.

    Raises:
        ConfigError: there is a key of that name, a limit is not allowed, or the file cannot be used.
    """
    from mlx_parallm.server.access import Role, new_key, read_keys, write_keys

    file = _file(args)
    keys = read_keys(file) if file.exists() else ()
    if any(key.name == args.name for key in keys):
        raise ConfigError(f"{args.name}: {file} has a key of that name; remove it first, or choose another name")
    limits = {name: value for name in _LIMITS.values() if (value := getattr(args, name)) is not None}
    key, secret = new_key(args.name, Role(args.role), **limits)
    write_keys(file, [*keys, key])
    text = f"{secret}\n\nThis key is not shown again. Serve with: mlx_parallm_serve --keys-file {file}"
    return show(args, {"name": key.name, "role": key.role, "key": secret, "keys_file": str(file)}, text)


@takes(*_FILE)
def _list(args: Namespace) -> int:
    """Prints the keys without their hashes. Raises ConfigError if the file cannot be read."""
    from mlx_parallm.server.access import read_keys

    file = _file(args)
    keys = read_keys(file)
    none = f"no keys in {file}; mlx_parallm keys add makes one"
    data = [key.model_dump(mode="json", exclude={"sha256"}) for key in keys]
    return show(args, data, table([("name", "role", "created", *_LIMITS), *map(_row, keys)]) if keys else none)


@takes(argument("name", metavar="NAME", help="The name of the key."), *_FILE)
def _remove(args: Namespace) -> int:
    """Removes a key. Raises ConfigError if there is none of that name, or the file cannot be used."""
    from mlx_parallm.server.access import read_keys, write_keys

    file = _file(args)
    keys = read_keys(file)
    left = [key for key in keys if key.name != args.name]
    if len(left) == len(keys):
        names = ", ".join(key.name for key in keys[:10]) or "none"
        raise ConfigError(f"{args.name}: {file} has no key of that name; there are {names}")
    write_keys(file, left)
    return show(args, {"removed": args.name}, f"removed {args.name}")


def _row(key: NamedKey) -> tuple[object, ...]:
    limits = {name: getattr(key, name) for name in _LIMITS.values()}
    limits |= {
        "own_prefix_cache": "yes" if key.own_prefix_cache else "no",
        "adapters": ",".join(key.adapters or ["all"]),
    }
    return key.name, key.role, key.created, *limits.values()


COMMANDS = subcommands(
    ("add", "Make a key and print it. It is shown only now: the file has its hash.", _add),
    ("list", "List the keys, their roles and their limits.", _list),
    ("remove", "Remove a key. A running server refuses it from its next request on.", _remove),
)
