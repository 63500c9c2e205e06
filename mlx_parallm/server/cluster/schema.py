"""The bodies of `/v1/cluster` and the routes below it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from mlx_parallm.core import ClusterStatus, Joined, Joining, NodeInfo, NodeRole, SharedVersion
from mlx_parallm.server.api.fields import WireInput, WireOutput
from mlx_parallm.server.cluster.router import RoutingCounts


class JoinBody(WireInput):
    """What a node says when it joins."""

    role: Literal["replica", "trainer"]
    """What the node is for."""
    url: str
    """Where the other nodes reach its HTTP server; empty if it has none."""
    fingerprint: str | None = None
    """That of its base model; null asks which one there is."""
    version: str
    """The version of its package."""

    def joining(self) -> Joining:
        """The same for `core.ClusterClient.join`."""
        return Joining(NodeRole(self.role), self.url, self.fingerprint, self.version)


class BaseFileObject(WireOutput):
    """A file of the base model."""

    path: str
    """Its name, for `GET /v1/cluster/base/{file}`."""
    bytes: int
    """Its size."""
    sha256: str
    """Its checksum."""


class BaseObject(WireOutput):
    """The base model of the cluster."""

    name: str
    """Its name in requests."""
    fingerprint: str
    """What identifies it."""
    files: list[BaseFileObject]
    """Its files, if the node has asked which base model there is."""


class JoinAnswer(WireOutput):
    """What a node needs to take part."""

    node_id: str
    """The id of the node."""
    nats_url: str
    """Where NATS is."""
    nats_token: str
    """The token for NATS; empty if it wants none."""
    base: BaseObject
    """The base model."""

    @classmethod
    def of(cls, joined: Joined) -> JoinAnswer:
        """The answer to a node that has joined."""
        files = [BaseFileObject(path=file.path, bytes=file.bytes, sha256=file.sha256) for file in joined.base.files]
        base = BaseObject(name=joined.base.name, fingerprint=joined.base.fingerprint, files=files)
        return cls(node_id=joined.node_id, nats_url=joined.nats_url, nats_token=joined.nats_token, base=base)


class VersionObject(WireOutput):
    """A shared adapter version."""

    name: str
    """The adapter's name."""
    version: int
    """The number of the version."""
    sha256: str
    """The checksum of its archive."""
    bytes: int
    """The size of its archive."""
    fence: int
    """The number of the lease of the trainer that published it."""
    live: bool
    """Whether the name means this version."""

    @classmethod
    def of(cls, version: SharedVersion, live: bool = False) -> VersionObject:
        """The version as the registry has it."""
        return cls(
            name=version.name,
            version=version.version,
            sha256=version.sha256,
            bytes=version.bytes,
            fence=version.fence,
            live=live,
        )


class NodeObject(WireOutput):
    """A node that is present."""

    id: str
    """Its id."""
    role: NodeRole
    """head, replica or trainer."""
    url: str
    """Where the other nodes reach it."""
    holds: list[str]
    """The shared adapter versions that it can serve."""
    outstanding_tokens: int
    """Tokens of the requests that it is answering: those of prompts, and those that may still be generated."""
    ready: bool
    """Whether it takes requests."""
    requests: int
    """Requests that the head has sent it. 0 in the answers of other nodes."""

    @classmethod
    def of(cls, node: NodeInfo, counts: RoutingCounts, sees: Callable[[str], bool]) -> NodeObject:
        """The node as it describes itself."""
        return cls(
            id=node.id,
            role=node.role,
            url=node.url,
            holds=[version for version in node.holds if sees(version.partition("@")[0])],
            outstanding_tokens=node.outstanding_tokens,
            ready=node.ready,
            requests=counts.requests[node.id],
        )


class ClusterObject(WireOutput):
    """A cluster as one of its nodes sees it."""

    object: Literal["cluster"]
    node: str
    """The id of that node."""
    connected: bool
    """Whether it is connected to NATS."""
    nodes: list[NodeObject]
    """The nodes that are present."""
    versions: list[VersionObject]
    """The shared adapter versions."""
    unusable: dict[str, str]
    """Shared versions that this node cannot serve, with the reason."""
    waiting: dict[str, int]
    """Requests whose answers wait for the trainer of an adapter, by its name."""
    nodes_lost: int
    """Nodes that fell silent since this one was started."""
    requests_retried: int
    """Requests that the head began anew on another node."""
    streams_broken: int
    """Streams that ended with an error because their node was lost."""

    @classmethod
    def of(cls, status: ClusterStatus, counts: RoutingCounts, sees: Callable[[str], bool]) -> ClusterObject:
        """The cluster with what the router has counted. `sees`: whether the reader may know of an adapter."""
        staged = sorted(status.versions.staged.values(), key=lambda version: (version.name, version.version))
        live = {version.ref for version in status.versions.live.values()}
        return cls(
            object="cluster",
            node=status.node_id,
            connected=status.connected,
            nodes=[NodeObject.of(node, counts, sees) for node in status.nodes],
            versions=[VersionObject.of(version, version.ref in live) for version in staged if sees(version.name)],
            unusable={name: why for name, why in status.unusable.items() if sees(name.partition("@")[0])},
            waiting={name: count for name, count in status.waiting.items() if sees(name)},
            nodes_lost=status.lost_total,
            requests_retried=counts.retried,
            streams_broken=counts.broken,
        )
