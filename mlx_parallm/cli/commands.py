"""The commands of `mlx_parallm` apart from `serve` and `train`. Each takes the parsed arguments and returns its exit
status; those that talk to a running server raise the errors that `Client` lists."""

from __future__ import annotations

import os
import platform
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from mlx_parallm import __version__
from mlx_parallm.app.banner import listed
from mlx_parallm.cli.client import Client
from mlx_parallm.config import API_KEY_VARIABLE, human_bytes
from mlx_parallm.errors import ModelNotFoundError

_LOAD_TIMEOUT_S = 600.0
"""Loading an adapter reads files and waits for its turn between requests."""
_ADAPTER_COLUMNS = ("id", "live", "residence", "rank", "targets", "bytes", "root")


def _client(args: Namespace) -> Client:
    return Client(args.url, args.api_key or os.environ.get(API_KEY_VARIABLE))


# -- this machine --------------------------------------------------------------------------------


def version(args: Namespace) -> int:
    """Prints the versions of this package, MLX, mlx-lm and Python."""
    print(f"mlx_parallm {__version__}")
    for package in ("mlx", "mlx-lm"):
        print(f"{package} {metadata.version(package)}")
    print(f"python {platform.python_version()} on {platform.platform(terse=True)}")
    return 0


def doctor(args: Namespace) -> int:
    """Prints a report about this machine. Warnings are part of the report and do not change the exit status."""
    from mlx_parallm.model.device import report

    print(report())
    return 0


def list_models(args: Namespace) -> int:
    """Prints the bundled model and those in the Hugging Face cache, with their sizes on disk."""
    rows = [*_bundled_model(), *_cached_models()]
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, size, note in rows:
        print(f"{name:<{width}}  {human_bytes(size):>10}  {note}")
    if not rows:
        print("no models on this machine; --model-path with a hub id downloads one")
    return 0


def _bundled_model() -> list[tuple[str, int, str]]:
    from mlx_parallm.model.bundled import BUNDLED_NAME, bundled_path

    try:
        size = bundled_path().stat().st_size
    except ModelNotFoundError:  # its package is not installed; the other models are still listed
        return []
    return [(BUNDLED_NAME, size, "bundled: served when no --model-path is given")]


def _cached_models() -> list[tuple[str, int, str]]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:  # nothing was ever downloaded
        return []
    models = sorted((repo for repo in repositories if repo.repo_type == "model"), key=lambda repo: repo.repo_id)
    return [(repo.repo_id, repo.size_on_disk, str(repo.repo_path)) for repo in models]


# -- a running server ----------------------------------------------------------------------------


def ps(args: Namespace) -> int:
    """Prints the models, adapters, sequences and memory of a running server."""
    client = _client(args)
    models, adapters, state = (client.get(path) for path in ("/v1/models", "/v1/adapters", "/debug/state"))
    with client.reading():
        text = _server_summary(client.base, models, adapters, state["engine"])
    print(text)
    return 0


def _server_summary(
    base: str, models: Mapping[str, Any], adapters: Mapping[str, Any], engine: Mapping[str, Any]
) -> str:
    names = ", ".join(model["id"] for model in models["data"])
    live = listed([card["id"] for card in adapters["data"] if card["live"]])
    slots = f"{adapters['slots']['used']} of {adapters['slots']['total']} slots used"
    lines = (
        base,
        f"models    {names}",
        f"adapters  {live} ({slots})",
        f"running   {engine['running']}",
        f"waiting   {engine['waiting']}",
        f"KV cache  {human_bytes(engine['kv_bytes_held'])} of {human_bytes(engine['kv_bytes_budget'])}",
    )
    return "\n  ".join(lines)


def list_adapters(args: Namespace) -> int:
    """Prints the adapters of a running server, its route and its slots."""
    client = _client(args)
    answer = client.get("/v1/adapters")
    with client.reading():
        text = _adapters_text(answer)
    print(text)
    return 0


def load_adapter(args: Namespace) -> int:
    """Loads an adapter into a running server. A path that exists on this machine is sent as an absolute path."""
    local = Path(args.path).expanduser()
    path = str(local.resolve()) if local.exists() else args.path
    client = _client(args)
    body = {"lora_name": args.name, "lora_path": path, "load_inplace": args.replace}
    answer = client.post("/v1/load_lora_adapter", body, _LOAD_TIMEOUT_S)
    with client.reading():
        text = f"{answer['lora_name']}@{answer['version']} is live"
    print(text)
    return 0


def unload_adapter(args: Namespace) -> int:
    """Removes every version of a name, or one version, from a running server."""
    client = _client(args)
    answer = client.post("/v1/unload_lora_adapter", {"lora_name": args.name})
    with client.reading():
        text = f"unloaded {', '.join(answer['unloaded'])}"
    print(text)
    return 0


def _adapters_text(answer: Mapping[str, Any]) -> str:
    slots, bank = answer["slots"], human_bytes(answer["bank_bytes"])
    route = ", ".join(f"{selector} {100 * share:.3g} %" for selector, share in answer["route"].items())
    adapters = _table([_ADAPTER_COLUMNS, *map(_adapter_row, answer["data"])]) if answer["data"] else "no adapters"
    used = f"{slots['used']} of {slots['total']} used, {slots['pinned']} pinned, bank {bank}"
    return f"{adapters}\n\nroute  {route}\nslots  {used}"


def _adapter_row(card: Mapping[str, Any]) -> tuple[str, ...]:
    live, targets, size = "yes" if card["live"] else "no", ",".join(card["targets"]), human_bytes(card["bytes"])
    return (card["id"], live, card["residence"], str(card["rank"]), targets, size, card["root"] or "-")


def _table(rows: Sequence[Sequence[str]]) -> str:
    """One line for each row, with columns as wide as their longest cell. All rows have the same number of cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


# -- adapter files -------------------------------------------------------------------------------


def merge_adapter(args: Namespace) -> int:
    """Writes a model directory with the adapter merged into the weights."""
    from mlx_parallm.model.merge import merge

    merge(args.model_path, args.adapter, args.output, dequantize=args.dequantize)
    print(f"wrote {args.output}; serve it with `mlx_parallm serve --model-path {shlex.quote(str(args.output))}`")
    return 0


def convert_adapter(args: Namespace) -> int:
    """Writes an adapter in another program's format."""
    from mlx_parallm.model.merge import convert

    convert(args.model_path, args.adapter, args.output, args.format)
    print(f"wrote {args.output} in the format of {args.format}")
    return 0
