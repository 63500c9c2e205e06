"""The commands for the adapters of a running server: adapters list, load and unload."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.cli.parser import AddCommand
from mlx_parallm.cli.remote.client import Client, add_request_arguments
from mlx_parallm.cli.table import show, table
from mlx_parallm.config import human_bytes

_LOAD_TIMEOUT_S = 600.0
"""Loading an adapter reads files and waits for its turn between requests."""
_COLUMNS = ("id", "live", "residence", "rank", "targets", "bytes", "root")


def add_commands(add: AddCommand) -> None:
    """Adds the commands."""
    listing = add("list", "List the adapters of a running server, its route and its slots.")
    add_request_arguments(listing, list_adapters)

    loading = add("load", "Load an adapter into a running server.")
    loading.add_argument("name", metavar="NAME", help="The name by which requests select it.")
    loading.add_argument(
        "path", metavar="PATH", help="Its folder on this machine, or a path under the server's adapter folders."
    )
    loading.add_argument("--base", metavar="MODEL", help="The base model that it is for, on a server with several.")
    loading.add_argument("--replace", action="store_true", help="Replace the adapter that has NAME (load_inplace).")
    add_request_arguments(loading, load_adapter)

    unloading = add("unload", "Remove an adapter from a running server. Running requests finish with it.")
    unloading.add_argument("name", metavar="NAME", help="A name, or one version of it: NAME@VERSION.")
    unloading.add_argument("--base", metavar="MODEL", help="The base model that it must be one of.")
    add_request_arguments(unloading, unload_adapter)


def list_adapters(args: Namespace) -> int:
    """Prints the adapters of a running server, its route and its slots."""
    client = Client(args)
    answer = client.ask("/v1/adapters")
    with client.reading():
        text = _text(answer)
    return show(args, answer, lambda: text)


def load_adapter(args: Namespace) -> int:
    """Loads an adapter into a running server. A path that exists on this machine is sent as an absolute path."""
    local = Path(args.path).expanduser()
    path = str(local.resolve()) if local.exists() else args.path
    client = Client(args)
    body = {"lora_name": args.name, "lora_path": path, "load_inplace": args.replace, **_of_base(args)}
    answer = client.ask("/v1/load_lora_adapter", body, _LOAD_TIMEOUT_S)
    with client.reading():
        text = f"{answer['lora_name']}@{answer['version']} is live"
    return show(args, answer, lambda: text)


def unload_adapter(args: Namespace) -> int:
    """Removes every version of a name, or one version, from a running server."""
    client = Client(args)
    answer = client.ask("/v1/unload_lora_adapter", {"lora_name": args.name, **_of_base(args)})
    with client.reading():
        text = f"unloaded {', '.join(answer['unloaded'])}"
    return show(args, answer, lambda: text)


def _of_base(args: Namespace) -> dict[str, str]:
    return {} if args.base is None else {"base_model_name": args.base}


def _text(answer: Mapping[str, Any]) -> str:
    slots, bank = answer["slots"], human_bytes(answer["bank_bytes"])
    route = ", ".join(f"{selector} {100 * share:.3g} %" for selector, share in answer["route"].items())
    adapters = table([_COLUMNS, *map(_row, answer["data"])]) if answer["data"] else "no adapters"
    used = f"{slots['used']} of {slots['total']} used, {slots['pinned']} pinned, bank {bank}"
    return f"{adapters}\n\nroute  {route}\nslots  {used}"


def _row(card: Mapping[str, Any]) -> tuple[str, ...]:
    live, targets, size = "yes" if card["live"] else "no", ",".join(card["targets"]), human_bytes(card["bytes"])
    return (card["id"], live, card["residence"], str(card["rank"]), targets, size, card["root"] or "-")
