"""The metrics of a cluster. Only its nodes have samples of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.core import Metric

from mlx_parallm.extras.cluster.cards import ClusterStatus, NodeInfo
from mlx_parallm.extras.cluster.http.router import RoutingCounts
from mlx_parallm.server.backend import Backend
from mlx_parallm.server.metrics_table import Counter, Gauge, Labels, Table

NODE_LABELS = ("node", "role")


class Head(NamedTuple):
    """A head's view of its cluster, and what its router has done."""

    status: ClusterStatus
    counts: RoutingCounts


def node_labels(node: NodeInfo) -> Labels:
    """The values of `NODE_LABELS`."""
    return node.id, node.role.value


NODES: Table[NodeInfo] = Table(
    NODE_LABELS,
    Gauge("cluster_node_ready", "1 while the node takes requests.", lambda node: node.ready),
    Gauge(
        "cluster_node_outstanding_tokens",
        "Tokens of the requests that the node is answering: those of prompts, and those that may still be generated.",
        lambda node: node.outstanding_tokens,
    ),
    Gauge(
        "cluster_node_versions_held", "Shared adapter versions that the node can serve.", lambda node: len(node.holds)
    ),
)
CLUSTER: Table[ClusterStatus] = Table(
    (),
    Gauge("cluster_connected", "1 while this node is connected to NATS.", lambda status: status.connected),
    Gauge(
        "cluster_versions_staged",
        "Shared adapter versions, the live ones included.",
        lambda status: len(status.versions.staged),
    ),
    Gauge(
        "cluster_versions_live",
        "Names of adapters that have a live shared version.",
        lambda status: len(status.versions.live),
    ),
    Gauge(
        "cluster_versions_unusable",
        "Shared adapter versions that this node cannot serve.",
        lambda status: len(status.unusable),
    ),
    Counter(
        "cluster_nodes_lost", "Nodes that fell silent since this one was started.", lambda status: status.lost_total
    ),
)
HEAD: Table[Head] = Table(
    (),
    Counter(
        "cluster_requests_retried",
        "Requests that the head began anew on another node.",
        lambda head: head.counts.retried,
    ),
    Counter(
        "cluster_streams_broken",
        "Streams that ended with an error because their node was lost.",
        lambda head: head.counts.broken,
    ),
    Gauge(
        "cluster_requests_to_learn",
        "Requests whose answers wait for the trainer of the adapter.",
        lambda head: head.status.waiting,
        by=("adapter",),
    ),
    Counter(
        "cluster_requests",
        "Requests that the head has sent to the node.",
        lambda head: {node_labels(node): head.counts.requests[node.id] for node in head.status.nodes},
        by=NODE_LABELS,
    ),
)


def metrics(backend: Backend) -> Iterator[Metric]:
    """The head has a series for each node that is present, so that one scrape shows the whole cluster; another node
    has those of itself. The series of a node end when the node is gone."""
    status: dict[Labels, ClusterStatus] = {}
    nodes: dict[Labels, NodeInfo] = {}
    heads: dict[Labels, Head] = {}
    cluster = backend.cluster
    if cluster is not None:
        routes, now = cluster.client.routes, cluster.client.status()
        status[()] = now
        nodes = {node_labels(node): node for node in now.nodes if routes or node.id == now.node_id}
        if routes:
            heads[()] = Head(now, cluster.counts)
    yield from CLUSTER.read(status)
    yield from NODES.read(nodes)
    yield from HEAD.read(heads)
