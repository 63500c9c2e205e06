"""The section `cluster`: several nodes that serve and train one model. The string below a field is its description."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from mlx_parallm.config.types import SERVE, ApiKey, Flag, Folder, Section, Text


def _check_address(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdecimal() and 0 < int(port) < 65536) or "/" in address:
        raise ValueError("must be HOST:PORT, such as node1:8000, without http://")
    return address


def _check_nats_url(url: str) -> str:
    if not url.startswith(("nats://", "tls://")):
        raise ValueError("must begin with nats:// or tls://, such as nats://10.0.0.1:4222")
    return url


Address = Annotated[str, AfterValidator(_check_address)]
NatsUrl = Annotated[Text, AfterValidator(_check_nats_url)]


class ClusterConfig(Section):
    """Several nodes that serve one base model and share its adapters. The first one is started with --share-model, the
    others with --connect-to. Needs the extra cluster.
    """

    share_model: Annotated[bool, Flag("--share-model", only=SERVE)] = False
    """Be the first node of a cluster, its head. The head sends requests to the other nodes, keeps the adapter versions
    that all nodes share, and gives its base model to nodes that lack it. It listens on 0.0.0.0 unless server.host says
    otherwise.
    """
    connect_to: Annotated[Address | None, Flag("--connect-to", "HOST:PORT")] = None
    """Join the cluster of the head at this HOST:PORT. mlx_parallm_serve becomes one more server of its requests, which
    listens on 0.0.0.0 unless server.host says otherwise. mlx_parallm_train trains an adapter for all nodes. null means
    no cluster.
    """
    token: Annotated[ApiKey | None, Flag("--cluster-token", "TOKEN")] = Field(default=None, repr=False)
    """Secret that all nodes of a cluster have. null means that the head makes one, keeps it in the file token of
    state_dir and names that file when it is ready. Prefer the environment variable, because flags are easily seen by
    others.
    """
    nats_url: Annotated[NatsUrl | None, Flag("--nats-url", "URL", only=SERVE)] = None
    """A NATS server with JetStream for the head to use, such as nats://10.0.0.1:4222. null means that the head starts
    one, which ends with it.
    """
    state_dir: Annotated[Folder, Flag("--cluster-dir", "DIR")] = Path("cluster")
    """Folder of the head's registry and of the shared adapter versions; in other nodes, of what they have fetched. Two
    processes cannot use the same one.
    """
    advertise: Annotated[Address | None, Flag("--advertise", "HOST:PORT", only=SERVE)] = None
    """The HOST:PORT at which other nodes reach this one, if it is not the address from which it connects to them. null
    means that address.
    """

    @model_validator(mode="after")
    def _is_one_kind_of_node(self) -> Self:
        if self.share_model and self.connect_to is not None:
            raise ValueError("share_model is for the first node, and connect_to for the others; keep one of the two")
        if self.nats_url is not None and not self.share_model:
            raise ValueError("nats_url is for the head, which tells the other nodes; add --share-model or remove it")
        return self

    @property
    def wanted(self) -> bool:
        """Whether this process is a node of a cluster."""
        return self.share_model or self.connect_to is not None
