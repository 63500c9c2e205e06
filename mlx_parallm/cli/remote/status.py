"""`mlx_parallm ps`: what a running server is doing."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from mlx_parallm.app.banner import listed
from mlx_parallm.cli.remote.client import Client, add_request_arguments
from mlx_parallm.cli.table import show
from mlx_parallm.config import human_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_request_arguments(parser, ps)


def ps(args: Namespace) -> int:
    """Prints the models, adapters, sequences and memory of a running server."""
    client = Client(args)
    models, adapters, state = (client.ask(path) for path in ("/v1/models", "/v1/adapters", "/debug/state"))
    with client.reading():
        text = _summary(client.base, models, adapters, state["engine"])
    return show(args, {"url": client.base, "models": models, "adapters": adapters, "state": state}, lambda: text)


def _summary(base: str, models: Mapping[str, Any], adapters: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    names = ", ".join(model["id"] for model in models["data"])
    live = listed([card["id"] for card in adapters["data"] if card["live"]])
    slots = f"{adapters['slots']['used']} of {adapters['slots']['total']} slots used"
    held, budget, cached = (human_bytes(engine[f"kv_bytes_{kind}"]) for kind in ("held", "budget", "cached"))
    lines = (
        base,
        f"models    {names}",
        f"adapters  {live} ({slots})",
        f"running   {engine['running']}",
        f"waiting   {engine['waiting']}",
        f"KV cache  {held} of {budget}, cached prefixes {cached}",
    )
    return "\n  ".join(lines)
