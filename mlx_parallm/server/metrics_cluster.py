"""Prometheus metrics of a cluster, read on each scrape. Only nodes of a cluster have samples of them.

The head has a series for each node that is present, so that one scrape shows the whole cluster; another node has those
of itself. The series of a node end when the node is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_parallm.core.cluster import ClusterStatus, NodeInfo
from mlx_parallm.server.cluster.parts import ClusterParts
from mlx_parallm.server.cluster.router import RoutingCounts
from mlx_parallm.server.metrics_collectors import PREFIX

CLUSTER_PREFIX = PREFIX + "cluster_"
NODE_LABELS = ("node", "role")
NODE_GAUGES: Mapping[str, tuple[str, Callable[[NodeInfo], float]]] = {
    "node_ready": ("1 while the node takes requests.", lambda node: node.ready),
    "node_outstanding_tokens": (
        "Tokens of the requests that the node is answering: those of prompts, and those that may still be generated.",
        lambda node: node.outstanding_tokens,
    ),
    "node_versions_held": ("Shared adapter versions that the node can serve.", lambda node: len(node.holds)),
}
CLUSTER_GAUGES: Mapping[str, tuple[str, Callable[[ClusterStatus], float]]] = {
    "connected": ("1 while this node is connected to NATS.", lambda status: status.connected),
    "versions_staged": ("Shared adapter versions, the live ones included.", lambda status: len(status.versions.staged)),
    "versions_live": ("Names of adapters that have a live shared version.", lambda status: len(status.versions.live)),
    "versions_unusable": (
        "Shared adapter versions that this node cannot serve.",
        lambda status: len(status.unusable),
    ),
}
CLUSTER_COUNTERS: Mapping[str, tuple[str, Callable[[ClusterStatus], float]]] = {
    "nodes_lost": ("Nodes that fell silent since this one was started.", lambda status: status.lost_total),
}
TO_LEARN = "Requests whose answers wait for the trainer of the adapter."
ROUTING_COUNTERS: Mapping[str, tuple[str, Callable[[RoutingCounts], float]]] = {
    "requests_retried": ("Requests that the head began anew on another node.", lambda counts: counts.retried),
    "streams_broken": ("Streams that ended with an error because their node was lost.", lambda counts: counts.broken),
}


class ClusterCollector(Collector):
    """Used on the event loop's thread only. `cluster`: None if this server is not a node of one."""

    def __init__(self, cluster: ClusterParts | None) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        if self._cluster is None:
            yield from _metrics((), (), ())
            return
        status, routes = self._cluster.client.status(), self._cluster.client.routes
        nodes = [node for node in status.nodes if routes or node.id == status.node_id]
        yield from _metrics((status,), nodes, (self._cluster.counts,) if routes else ())


def _metrics(
    statuses: Sequence[ClusterStatus], nodes: Sequence[NodeInfo], routing: Sequence[RoutingCounts]
) -> Iterator[Metric]:
    """All families, also those without samples. `statuses` and `routing` have one element, or none."""
    for name, (about, of_node) in NODE_GAUGES.items():
        gauge = GaugeMetricFamily(CLUSTER_PREFIX + name, about, labels=NODE_LABELS)
        yield _filled(gauge, ((_labels(node), of_node(node)) for node in nodes))
    for name, (about, of_status) in CLUSTER_GAUGES.items():
        gauge = GaugeMetricFamily(CLUSTER_PREFIX + name, about)
        yield _filled(gauge, (((), of_status(status)) for status in statuses))
    for name, (about, of_status) in CLUSTER_COUNTERS.items():
        counter = CounterMetricFamily(CLUSTER_PREFIX + name, about)
        yield _filled(counter, (((), of_status(status)) for status in statuses))
    for name, (about, of_routing) in ROUTING_COUNTERS.items():
        counter = CounterMetricFamily(CLUSTER_PREFIX + name, about)
        yield _filled(counter, (((), of_routing(counts)) for counts in routing))
    of_head = statuses if routing else ()
    waiting = GaugeMetricFamily(CLUSTER_PREFIX + "requests_to_learn", TO_LEARN, labels=("adapter",))
    yield _filled(waiting, (((name,), count) for status in of_head for name, count in status.waiting.items()))
    requests = CounterMetricFamily(
        CLUSTER_PREFIX + "requests", "Requests that the head has sent to the node.", labels=NODE_LABELS
    )
    yield _filled(requests, ((_labels(node), counts.requests[node.id]) for counts in routing for node in nodes))


def _labels(node: NodeInfo) -> tuple[str, ...]:
    return node.id, node.role.value


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    """The family with these samples, each with the values of its labels."""
    for labels, value in samples:
        family.add_metric(labels, float(value))
    return family
