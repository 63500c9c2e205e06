"""`mlx_parallm ps` and `usage`: what a running server, or its cluster, is doing, and what each key has used."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.app.banner import listed
from mlx_parallm.cli.client import SERVER, Client
from mlx_parallm.cli.parser import argument, takes
from mlx_parallm.cli.show import JSON, local_time, show, table
from mlx_parallm.config import human_bytes

_NODES = ("node", "role", "address", "ready", "tokens to do", "requests", "versions", "of them live")
_USAGE = {
    "key": "key",
    "role": "role",
    "requests": "requests",
    "running": "running",
    "refused": "refused",
    "prompt tokens": "prompt_tokens",
    "of them cached": "cached_tokens",
    "answer tokens": "completion_tokens",
}
"""Columns, and the fields of the answer that they show."""
_WAITS = {"short of": "shortage", "training": "training_waits_for"}
"""Labels of what the machine lacks, and the fields of its state."""


@takes(argument("--cluster", action="store_true", help="Show the nodes of the server's cluster."), *SERVER, JSON)
def ps(args: Namespace) -> int:
    """Prints the models, adapters, sequences and memory of a running server; with --cluster, the nodes of its cluster
    and the adapter versions that they share."""
    client = Client(args)
    if args.cluster:
        return client.show(args, lambda cluster: _cluster(client.base, cluster), "/v1/cluster")
    models, adapters, state = (client.ask(path) for path in ("/v1/models", "/v1/adapters", "/debug/state"))
    with client.reading():
        text = _summary(client.base, models, adapters, state["engine"])
    return show(args, {"url": client.base, "models": models, "adapters": adapters, "state": state}, text)


@takes(*SERVER, JSON)
def usage(args: Namespace) -> int:
    """Prints what the key has used since the server started; with an admin key, what every key has used."""
    return Client(args).show(args, _usage, "/v1/usage")


def _usage(answer: Mapping[str, Any]) -> str:
    rows = [[each[field] for field in _USAGE.values()] for each in answer["data"]]
    return f"since {local_time(answer['since'])}\n" + (table([[*_USAGE], *rows]) if rows else "no requests yet")


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
        *([f"stuck     {engine['stuck']}"] if engine.get("stuck") else ()),
    )
    return "\n  ".join(lines)


def _under_way(card: Mapping[str, Any]) -> str:
    return f"{card['id']} ({card['leases']} under way)" if card["leases"] else str(card["id"])


def _cluster(base: str, cluster: Mapping[str, Any]) -> str:
    versions = {f"{each['name']}@{each['version']}": each["live"] for each in cluster["versions"]}
    live = [version for version, is_live in versions.items() if is_live]
    rows = [_node(node, versions, live) for node in cluster["nodes"]]
    lost, retried, broken = (cluster[name] for name in ("nodes_lost", "requests_retried", "streams_broken"))
    is_head = any(node["role"] == "head" for node in cluster["nodes"] if node["id"] == cluster["node"])
    connection = "connected" if cluster["connected"] else "NOT CONNECTED to NATS: what follows may be old"
    lines = (
        f"{base}  {cluster['node']}, {connection}",
        table([_NODES, *rows]) if rows else "no nodes",
        "",
        f"live      {listed(live)}",
        f"other     {listed([version for version in versions if version not in live])}",
        *(f"to learn  {count} requests for {name}" for name, count in cluster["waiting"].items()),
        *(f"unusable  {version}: {reason}" for version, reason in cluster["unusable"].items()),
        f"faults    {lost} nodes lost, {retried} requests retried, {broken} streams broken",
        *(() if is_head or not rows else ("note      only the head counts requests, retries and broken streams",)),
    )
    return "\n".join(lines)


def _node(node: Mapping[str, Any], versions: Mapping[str, bool], live: Sequence[str]) -> tuple[object, ...]:
    held = set(node["holds"])
    return (
        *(node["id"], node["role"], node["url"] or None, "yes" if node["ready"] else "no"),
        *(node["outstanding_tokens"], node["requests"]),
        f"{len(held & versions.keys())} of {len(versions)}",
        f"{len(held.intersection(live))} of {len(live)}",
    )
