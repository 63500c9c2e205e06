"""The commands for the adapters of a running server: adapters list, load, unload, rollback, route, save and delete."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.cli.parser import AddCommand
from mlx_parallm.cli.remote.client import Client, add_request_arguments
from mlx_parallm.cli.table import show, table
from mlx_parallm.config import human_bytes

_SLOW_S = 600.0
"""Loading, saving and routing read or write files, and wait for their turn between requests."""
_COMES_BACK = "What is in --adapter-dir or has checkpoints is loaded again when the server starts."
_COLUMNS = ("id", "live", "residence", "rank", "bytes", "requests", "root")


def add_commands(add: AddCommand) -> None:
    """Adds the commands."""
    listing = add("list", "List the adapters of a running server, its route and its slots.")
    add_request_arguments(listing, list_adapters)

    loading = add("load", "Load an adapter into a running server.")
    loading.add_argument("name", metavar="NAME", help="The name by which requests select it.")
    loading.add_argument(
        "path",
        metavar="PATH",
        help="Its folder on this machine, or a path under the server's adapter folders. A run, an adapter in it, and "
        "there `latest` or a tag, mean a checkpoint.",
    )
    loading.add_argument("--base", metavar="MODEL", help="The base model that it is for, on a server with several.")
    loading.add_argument("--replace", action="store_true", help="Replace the adapter that has NAME.")
    add_request_arguments(loading, load_adapter)

    unloading = add("unload", "Remove an adapter from a running server. Running requests finish with it.")
    unloading.add_argument("name", metavar="NAME", help="A name, or one version of it: NAME@VERSION.")
    unloading.add_argument("--base", metavar="MODEL", help="The base model that it must be one of.")
    add_request_arguments(unloading, unload_adapter)

    rolling = add("rollback", "Serve the previous version of an adapter again, or undo the last change of the route.")
    rolling.add_argument("name", nargs="?", metavar="NAME", help="The adapter. Default: the route.")
    add_request_arguments(rolling, roll_back)

    routing = add("route", "Show or set which adapters serve the requests that name none.")
    routing.add_argument(
        "shares",
        nargs="*",
        type=_share,
        metavar="NAME=WEIGHT",
        help="An adapter, a version or `base`, and its share; NAME alone has all. Default: show the route.",
    )
    add_request_arguments(routing, route)

    saving = add("save", "Save a version of an adapter as a checkpoint.")
    saving.add_argument("name", nargs="?", metavar="NAME", help="A name or version. Default: the default adapter.")
    saving.add_argument("--tag", metavar="TAG", help="A name for the checkpoint.")
    saving.add_argument("--step", type=int, metavar="NUMBER", help="Its number. Default: the next one.")
    add_request_arguments(saving, save)

    deleting = add("delete", "Remove an adapter and all that the server has kept of it. Without --yes, only list that.")
    deleting.add_argument("name", metavar="NAME", help="The adapter.")
    deleting.add_argument("--yes", action="store_true", help="Remove it.")
    deleting.add_argument("--stop-training", action="store_true", help="Stop its lesson and its training first.")
    add_request_arguments(deleting, delete)


def list_adapters(args: Namespace) -> int:
    """Prints the adapters of a running server, its route and its slots."""
    client = Client(args)
    answer = client.ask("/v1/adapters")
    with client.reading():
        text = _text(answer)
    return show(args, answer, lambda: text)


def load_adapter(args: Namespace) -> int:
    """Loads an adapter into a running server. A path that exists on this machine is sent as an absolute path."""
    from mlx_parallm.adapters.runs import adapter_in

    local = adapter_in(Path(args.path).expanduser())
    path = str(local.resolve()) if local.exists() else args.path
    client = Client(args)
    body = {"lora_name": args.name, "lora_path": path, "load_inplace": args.replace, **_of_base(args)}
    answer = client.ask("/v1/load_lora_adapter", body, _SLOW_S)
    with client.reading():
        warning = f"\nwarning: {answer['warning']}" if answer["warning"] else ""
        text = f"{answer['lora_name']}@{answer['version']} is live{warning}"
    return show(args, answer, lambda: text)


def unload_adapter(args: Namespace) -> int:
    """Removes every version of a name, or one version, from a running server."""
    client = Client(args)
    answer = client.ask("/v1/unload_lora_adapter", {"lora_name": args.name, **_of_base(args)})
    with client.reading():
        text = f"unloaded {', '.join(answer['unloaded'])}\n{_COMES_BACK}"
    return show(args, answer, lambda: text)


def roll_back(args: Namespace) -> int:
    """Makes the previous version of an adapter live, or undoes the last change of the route."""
    client = Client(args)
    answer = client.ask("/v1/adapters/rollback", {"lora_name": args.name} if args.name else {}, _SLOW_S)
    with client.reading():
        text = f"{answer['lora_adapter']} is live" if args.name else f"route  {_route(answer['route'])}"
    return show(args, answer, lambda: text)


def route(args: Namespace) -> int:
    """Shows the route, or sets it."""
    client = Client(args)
    body = {"weights": dict(args.shares)} if args.shares else None
    answer = client.ask("/v1/adapters/route", body, _SLOW_S)
    with client.reading():
        text = f"route  {_route(answer['route'])}"
    return show(args, answer, lambda: text)


def save(args: Namespace) -> int:
    """Saves a version of an adapter as a checkpoint."""
    client = Client(args)
    body = {"lora_name": args.name, "checkpoint_name": args.tag, "step": args.step}
    given = {field: value for field, value in body.items() if value is not None}
    answer = client.ask("/v1/training/checkpoint", given, _SLOW_S)
    with client.reading():
        text = f"saved {answer['lora_adapter']} as {', '.join([answer['name'], *answer['tags']])}"
    return show(args, answer, lambda: text)


def delete(args: Namespace) -> int:
    """Lists what a server has kept of an adapter and, with --yes, removes it."""
    client = Client(args)
    body = {"lora_name": args.name, "dry_run": not args.yes, "stop_training": args.stop_training}
    if args.yes and not args.json:
        _show_parts(client, client.ask("/v1/adapters/delete", {**body, "dry_run": True}, _SLOW_S))
    answer = client.ask("/v1/adapters/delete", body, _SLOW_S)
    if args.json:
        return show(args, answer, str)
    if args.yes:
        print(f"\nremoved {args.name} and all of this")
        return 0
    _show_parts(client, answer)
    stop = " --stop-training" if answer["in_training"] else ""
    print(f"\nnothing was removed; `mlx_parallm adapters delete {args.name} --yes{stop}` removes all of this")
    return 0


def _show_parts(client: Client, answer: Mapping[str, Any]) -> None:
    with client.reading():
        print(table([("what", "count", "size", "where"), *map(_part, answer["parts"])]))


def _part(part: Mapping[str, Any]) -> tuple[str, ...]:
    size = human_bytes(part["bytes"]) if part["bytes"] else "-"
    return part["what"], str(part["count"]), size, part["path"] or "memory"


def _share(text: str) -> tuple[str, float]:
    name, given, weight = text.rpartition("=")
    try:
        return (name, float(weight)) if given else (text, 1.0)
    except ValueError:
        raise ArgumentTypeError(f"{text!r}: after '=' comes a number, such as {name}=0.1") from None


def _of_base(args: Namespace) -> dict[str, str]:
    return {} if args.base is None else {"base_model_name": args.base}


def _text(answer: Mapping[str, Any]) -> str:
    slots, bank = answer["slots"], human_bytes(answer["bank_bytes"])
    adapters = table([_COLUMNS, *map(_row, answer["data"])]) if answer["data"] else "no adapters"
    used = f"{slots['used']} of {slots['total']} used, {slots['pinned']} pinned, bank {bank}"
    return f"{adapters}\n\nroute  {_route(answer['route'])}\nslots  {used}"


def _route(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{selector} {100 * share:.3g} %" for selector, share in shares.items())


def _row(card: Mapping[str, Any]) -> tuple[str, ...]:
    live, size, requests = "yes" if card["live"] else "no", human_bytes(card["bytes"]), str(card["requests"])
    return (card["id"], live, card["residence"], str(card["rank"]), size, requests, card["root"] or "-")
