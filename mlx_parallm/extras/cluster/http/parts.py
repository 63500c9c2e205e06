"""What routes and metrics need of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlx_parallm.core.trajectories import CollectingClient
from mlx_parallm.extras.cluster.http.counted import CountedEngine
from mlx_parallm.extras.cluster.http.remote import RemoteEngines
from mlx_parallm.extras.cluster.http.router import RoutedEngine, RoutingCounts
from mlx_parallm.server.backend import Backend

if TYPE_CHECKING:
    from mlx_parallm.extras.cluster.node import Node


@dataclass(frozen=True, slots=True)
class ClusterParts:
    """This node of a cluster. `own`: the engine of this node. `counts`: of the router, if this node is the head.
    `collection`: takes requests to be collected; None: there are none."""

    client: Node
    own: CountedEngine
    counts: RoutingCounts
    collection: CollectingClient | None


def join(backend: Backend, client: Node, collection: CollectingClient | None = None) -> Backend:
    """The backend as a node of a cluster, whose nodes share its first base model. The engine of a head answers requests
    with the engines of all nodes."""
    own = CountedEngine(backend.engine)
    if not client.routes:
        return replace(backend, engine=own, cluster=ClusterParts(client, own, RoutingCounts(), collection))
    engine = RoutedEngine(own, client, RemoteEngines(client.token), backend.models.first.card.name)
    return replace(backend, engine=engine, cluster=ClusterParts(client, own, engine.counts, collection))
