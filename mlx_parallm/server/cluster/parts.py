"""What routes and metrics need of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from mlx_parallm.core.engine import EngineClient
from mlx_parallm.server.cluster.counted import CountedEngine
from mlx_parallm.server.cluster.remote import RemoteEngines
from mlx_parallm.server.cluster.router import RoutedEngine, RoutingCounts

if TYPE_CHECKING:
    from mlx_parallm.cluster.node import Node


@dataclass(frozen=True, slots=True)
class ClusterParts:
    """This node of a cluster. `engine`: what answers its clients' requests. `own`: the engine of this node. `counts`:
    of the router, if this node is the head."""

    client: Node
    engine: EngineClient
    own: CountedEngine
    counts: RoutingCounts

    @classmethod
    def of(cls, client: Node, engine: EngineClient, first_base: str) -> Self:
        """Those of a node with this engine. `first_base`: the name of the base model that the nodes share."""
        own = CountedEngine(engine)
        if not client.routes:
            return cls(client, own, own, RoutingCounts())
        routed = RoutedEngine(own, client, RemoteEngines(client.token), first_base)
        return cls(client, routed, own, routed.counts)
