"""The nodes of a cluster and the adapter versions that they share, as the other packages see them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.json_values import ANSWER


class NodeRole(StrEnum):
    """What a node is for."""

    HEAD = "head"
    """Keeps the registry and routes requests. It serves requests too."""
    REPLICA = "replica"
    """Serves requests that the head sends it."""
    TRAINER = "trainer"
    """Trains adapters and publishes their versions."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node says of itself, once a second."""

    __pydantic_config__ = ANSWER

    id: str
    """Its id. It is the same after a restart."""
    role: NodeRole
    """head, replica or trainer."""
    url: str
    """Where the other nodes reach its HTTP server, such as `http://10.0.0.5:8000`; empty if it has none."""
    holds: tuple[str, ...] = ()
    """The shared adapter versions that it can serve, each as `name@version`."""
    outstanding_tokens: int = 0
    """Tokens of the requests that it is answering: those of prompts, and those that may still be generated."""
    ready: bool = False
    """Whether it takes requests."""
    incarnation: str = ""
    """It differs after each start of the process."""
    build: str = ""
    """The version of its package and the fingerprint of its base model. Nodes with another one are left out."""


@dataclass(eq=False, slots=True)
class Member:
    """A node that is present. `lost` is set when it is not any more, or when its process was started anew. `seen_at`:
    when it last renewed its lease. `left_out_until`: the router sends it nothing before then."""

    info: NodeInfo
    seen_at: float
    left_out_until: float = 0.0
    lost: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class SharedVersion:
    """An adapter version whose files the head keeps for all nodes, in an archive (see `extras.cluster.archive`)."""

    __pydantic_config__ = ANSWER

    name: str
    """The adapter's name."""
    version: int
    """The number of the version."""
    sha256: str
    """The checksum of its archive."""
    bytes: int
    """The size of its archive."""
    fence: int = 0
    """The number of the lease of the trainer that published it. A version with a lower one than the live version's is
    refused, so that a trainer that has lost its lease cannot publish any more."""

    @property
    def ref(self) -> AdapterRef:
        """The version as requests name it."""
        return AdapterRef(self.name, self.version)


@dataclass(frozen=True, slots=True)
class VersionState:
    """All shared versions at one time: the live one of each name, and all that are staged, which includes the live
    ones. `trained`: the names that a trainer has trained, now or before."""

    live: Mapping[str, SharedVersion] = field(default_factory=dict)
    staged: Mapping[AdapterRef, SharedVersion] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A file of the base model."""

    path: str
    """Its name, for `GET /v1/cluster/base/{file}`."""
    bytes: int
    """Its size."""
    sha256: str
    """Its checksum."""


@dataclass(frozen=True, slots=True)
class SharedBase:
    """The base model of the cluster."""

    __pydantic_config__ = ANSWER

    name: str
    """Its name in requests."""
    fingerprint: str
    """What identifies it."""
    files: tuple[BaseFile, ...] = ()
    """Its files, if the node has asked which base model there is, and does not have it with this package."""


@dataclass(frozen=True, slots=True)
class Joining:
    """What a node says when it joins. `fingerprint`: that of its base model; None: it asks which one there is."""

    role: NodeRole
    url: str
    fingerprint: str | None
    version: str
    """The version of its package."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What a node that joins needs to take part."""

    node_id: str
    """The id of the node."""
    nats_url: str
    """Where NATS is."""
    nats_token: str = field(repr=False)
    """The token for NATS; empty if it wants none."""
    base: SharedBase
    """The base model."""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A cluster as one of its nodes sees it.

    Attributes:
        node_id: that node.
        unusable: shared versions that this node cannot serve, with the reason.
        lost_total: nodes that were lost without a word.
        waiting: requests whose answers are sent and not yet learnt, by the name of the adapter that they train.
    """

    node_id: str
    connected: bool
    nodes: tuple[NodeInfo, ...]
    versions: VersionState
    unusable: Mapping[str, str]
    lost_total: int
    waiting: Mapping[str, int] = field(default_factory=dict)
