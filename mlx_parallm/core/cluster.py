"""The nodes of a cluster and the adapter versions that they share, as the other packages see them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mlx_parallm.core.adapters import AdapterRef


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
    """What a node says of itself, once a second.

    Attributes:
        id: names the node. It is the same after a restart.
        url: where the other nodes reach its HTTP server, such as `http://10.0.0.5:8000`. Empty: it has none.
        holds: the shared adapter versions that it can serve, each as `name@version`.
        outstanding_tokens: prompt tokens and tokens to generate of the requests that it is answering.
        ready: whether it takes requests.
        incarnation: differs after each start of the process.
    """

    id: str
    role: NodeRole
    url: str
    holds: tuple[str, ...] = ()
    outstanding_tokens: int = 0
    ready: bool = False
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class SharedVersion:
    """An adapter version whose files the head keeps for all nodes.

    Attributes:
        sha256, bytes: of its archive (see `cluster.archive`).
        fence: the number of the trainer's lease that published it. One with a lower number than the live version's is
            refused, so that a trainer that has lost its lease cannot publish any more.
    """

    name: str
    version: int
    sha256: str
    bytes: int
    fence: int = 0

    @property
    def ref(self) -> AdapterRef:
        """The version as requests name it."""
        return AdapterRef(self.name, self.version)
