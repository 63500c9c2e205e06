"""`mlx_parallm ps`: what a running server is doing, or the cluster that it is a node of."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.app.banner import listed
from mlx_parallm.cli.remote.client import Client, add_request_arguments
from mlx_parallm.cli.table import show, table
from mlx_parallm.config import human_bytes

_COLUMNS = ("node", "role", "address", "ready", "tokens to do", "requests", "versions", "of them live")

_WAITS = {"short of": "shortage", "training": "training_waits_for"}
"""Labels of what the machine lacks, and the fields of its state."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("--cluster", action="store_true", help="Show the nodes of the server's cluster.")
    add_request_arguments(parser, ps)


def ps(args: Namespace) -> int:
    """Prints the models, adapters, sequences and memory of a running server; with --cluster, the nodes of its cluster
    and the adapter versions that they share."""
    client = Client(args)
    if args.cluster:
        return _ps_cluster(args, client)
    models, adapters, state = (client.ask(path) for path in ("/v1/models", "/v1/adapters", "/debug/state"))
    with client.reading():
        text = _summary(client.base, models, adapters, state["engine"])
    return show(args, {"url": client.base, "models": models, "adapters": adapters, "state": state}, lambda: text)


def _summary(base: str, models: Mapping[str, Any], adapters: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    bases = dict.fromkeys(model["root"] for model in models["data"] if model["parent"] is None)
    live = listed([_under_way(card) for card in adapters["data"] if card["live"] or card["leases"]])
    slots = f"{adapters['slots']['used']} of {adapters['slots']['total']} slots used"
    held, budget, cached = (human_bytes(engine[f"kv_bytes_{kind}"]) for kind in ("held", "budget", "cached"))
    lines = (
        base,
        f"models    {', '.join(bases)}",
        f"adapters  {live} ({slots})",
        f"running   {engine['running']}",
        f"waiting   {engine['waiting']}",
        f"KV cache  {held} of {budget}, cached prefixes {cached}",
        *(f"{label:<8}  {text}" for label, field in _WAITS.items() if (text := engine["machine"][field])),
    )
    return "\n  ".join(lines)


def _under_way(card: Mapping[str, Any]) -> str:
    return f"{card['id']} ({card['leases']} under way)" if card["leases"] else str(card["id"])


def _ps_cluster(args: Namespace, client: Client) -> int:
    cluster = client.ask("/v1/cluster")
    with client.reading():
        text = _cluster(client.base, cluster)
    return show(args, cluster, lambda: text)


def _cluster(base: str, cluster: Mapping[str, Any]) -> str:
    versions = {f"{each['name']}@{each['version']}": each["live"] for each in cluster["versions"]}
    live = [version for version, is_live in versions.items() if is_live]
    rows = [_node(node, versions, live) for node in cluster["nodes"]]
    lost, retried, broken = (cluster[name] for name in ("nodes_lost", "requests_retried", "streams_broken"))
    is_head = any(node["role"] == "head" for node in cluster["nodes"] if node["id"] == cluster["node"])
    connection = "connected" if cluster["connected"] else "NOT CONNECTED to NATS: what follows may be old"
    lines = (
        f"{base}  {cluster['node']}, {connection}",
        table([_COLUMNS, *rows]) if rows else "no nodes",
        "",
        f"live      {listed(live)}",
        f"other     {listed([version for version in versions if version not in live])}",
        *(f"to learn  {count} requests for {name}" for name, count in cluster["waiting"].items()),
        *(f"unusable  {version}: {reason}" for version, reason in cluster["unusable"].items()),
        f"faults    {lost} nodes lost, {retried} requests retried, {broken} streams broken",
        *(() if is_head or not rows else ("note      only the head counts requests, retries and broken streams",)),
    )
    return "\n".join(lines)


def _node(node: Mapping[str, Any], versions: Mapping[str, bool], live: Sequence[str]) -> tuple[str, ...]:
    held = set(node["holds"])
    return (
        node["id"],
        node["role"],
        node["url"] or "-",
        "yes" if node["ready"] else "no",
        str(node["outstanding_tokens"]),
        str(node["requests"]),
        f"{len(held & versions.keys())} of {len(versions)}",
        f"{len(held.intersection(live))} of {len(live)}",
    )
