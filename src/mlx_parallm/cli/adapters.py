"""What `mlx_parallm adapters list | load | unload | merge` do."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.cli.client import Client
from mlx_parallm.cli.text import table
from mlx_parallm.config import human_bytes

STAGE_TIMEOUT_S = 600.0
"""A load reads files, and is staged beside traffic."""
_COLUMNS = ("id", "live", "residence", "rank", "targets", "bytes", "root")


def show(client: Client) -> int:
    """Prints the adapters of a server, then its route and slots. Raises what Client raises."""
    answer = client.get("/v1/adapters")
    with client.reading():
        text = _text(answer)
    print(text)
    return 0


def load(client: Client, name: str, path: str, replace: bool) -> int:
    """Makes `name` mean the adapter at `path`: of this machine when it is there, else as the server finds it."""
    here = Path(path).expanduser()
    where = str(here.resolve()) if here.exists() else path
    body = {"lora_name": name, "lora_path": where, "load_inplace": replace}
    answer = client.post("/v1/load_lora_adapter", body, STAGE_TIMEOUT_S)
    with client.reading():
        text = f"{answer['lora_name']}@{answer['version']} is live"
    print(text)
    return 0


def unload(client: Client, name: str) -> int:
    """Makes a server forget every version of `name`, or one version."""
    answer = client.post("/v1/unload_lora_adapter", {"lora_name": name})
    with client.reading():
        text = f"unloaded {', '.join(answer['unloaded'])}"
    print(text)
    return 0


def merge(adapter: Path, output: Path, model_path: str | None, dequantize: bool) -> int:
    """Writes the model with the adapter in its weights to `output`."""
    from mlx_parallm.model.merge import merge as write_merged

    write_merged(model_path, adapter, output, dequantize=dequantize)
    print(f"{output} is written; serve it with `mlx_parallm serve --model-path {shlex.quote(str(output))}`")
    return 0


def convert(adapter: Path, output: Path, model_path: str | None, form: str) -> int:
    """Writes the adapter to `output` in another program's format."""
    from mlx_parallm.model.convert import convert as write_converted

    write_converted(model_path, adapter, output, form)
    print(f"{output} is written, in the format of {form}")
    return 0


def _text(answer: Mapping[str, Any]) -> str:
    slots, bank = answer["slots"], human_bytes(answer["bank_bytes"])
    route = ", ".join(f"{selector} {100 * share:.3g} %" for selector, share in answer["route"].items())
    adapters = table([_COLUMNS, *map(_row, answer["data"])]) if answer["data"] else "no adapters"
    used = f"{slots['used']} of {slots['total']} used, {slots['pinned']} pinned, bank {bank}"
    return f"{adapters}\n\nroute  {route}\nslots  {used}"


def _row(card: Mapping[str, Any]) -> tuple[str, ...]:
    live, targets, size = "yes" if card["live"] else "no", ",".join(card["targets"]), human_bytes(card["bytes"])
    return (card["id"], live, card["residence"], str(card["rank"]), targets, size, card["root"] or "-")
