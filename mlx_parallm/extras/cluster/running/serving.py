"""A process as a node of a cluster: the head with --share-model, and replicas and trainers with --connect-to.

    prepare, prepare_trainer   before a model is loaded: checks, and which base model that is
    joined, joined_trainer     while the model is loaded: the node itself

Imported only by nodes, because it needs the extra `cluster`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from mlx_parallm.app.build import Served
from mlx_parallm.config import Config, is_loopback
from mlx_parallm.core.machine import Relief
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.cluster.addresses import EVERY_INTERFACE, in_url, outward_address, own_address
from mlx_parallm.extras.cluster.cards import Joined, SharedBase
from mlx_parallm.extras.cluster.head import HeadSettings, head
from mlx_parallm.extras.cluster.head_client import HeadUnreachableError
from mlx_parallm.extras.cluster.http.parts import join
from mlx_parallm.extras.cluster.node import Node, NodeReport
from mlx_parallm.extras.cluster.replica import ask_head, fetch_base, replica
from mlx_parallm.extras.cluster.running.collection import ClusterCollection
from mlx_parallm.extras.cluster.state import locked_folder
from mlx_parallm.extras.cluster.trainer import Trainer, trainer
from mlx_parallm.model.loading import fingerprint_of, source_of
from mlx_parallm.server.backend import Backend
from mlx_parallm.server.services import Services

_PATIENCE_S, _AGAIN_S = 10.0, 0.5
"""How long a node that starts waits for its head, and the pause between two attempts."""


def prepare(config: Config) -> Config:
    """The configuration with which a node loads its model.

    Raises:
        ConfigError: a setting does not work in a cluster, or the head does not answer or refuses this node.
    """
    if config.rl_training.enabled:
        raise ConfigError(
            "cluster: a node that serves does not train; leave out --enable-rl-training, or start it with "
            "--mode inference"
        )
    if config.server.scheme != "http":
        raise ConfigError("cluster: nodes speak plain HTTP to each other; leave out --ssl-certfile")
    server = config.server
    if not is_loopback(server.host) and server.api_key is None and server.keys_file is None:
        raise ConfigError(
            f"cluster: this node would listen on {server.host} without a key, and the network could control it. Set "
            "MLX_PARALLM_API_KEY or --keys-file, or listen on this machine only: --host 127.0.0.1"
        )
    if config.cluster.connect_to is None:
        return config
    return asyncio.run(_with_base(config, config.cluster.connect_to, _replica_folder(config)))


def prepare_trainer(config: Config) -> Config:
    """The configuration with which a trainer loads its model.

    Raises:
        ConfigError: the head does not answer or refuses this node.
    """
    assert config.cluster.connect_to is not None
    return asyncio.run(_with_base(config, config.cluster.connect_to, _trainer_folder(config)))


@asynccontextmanager
async def joined(config: Config, served: Served) -> AsyncIterator[Node]:
    """This server's node, until the block ends. `begin_serving` says that the HTTP server listens.

    Raises:
        ConfigError: its folder is used by another process, or NATS cannot be started or reached.
    """
    cluster = config.cluster
    source, fingerprint = await _source(config)
    if cluster.connect_to is not None:
        with locked_folder(_replica_folder(config)) as folder:
            async with replica(cluster.connect_to, fingerprint, _token(config), served.adapters, folder) as node:
                yield node
        return
    settings = HeadSettings(
        cluster.state_dir,
        SharedBase(served.card.name, fingerprint),
        source if source.is_dir() else None,
        config.server.host,
        cluster.nats_url,
        cluster.token.get_secret_value() if cluster.token else None,
        cluster.advertise.rpartition(":")[0] if cluster.advertise else None,
    )
    async with head(settings, served.adapters) as node:
        yield node


@asynccontextmanager
async def joined_trainer(config: Config, served: Served) -> AsyncIterator[Trainer]:
    """This run as the trainer of its adapter in the cluster, until the block ends.

    Raises:
        ConfigError: no head answers, or it refuses this node.
        ConflictError: another process trains the adapter.
    """
    assert config.cluster.connect_to is not None
    assert served.run is not None  # what trains has a run
    _, fingerprint = await _source(config)
    name = config.adapters.default_adapter
    try:
        async with trainer(config.cluster.connect_to, _token(config), fingerprint, name, served.run.id) as node:
            yield node
    except HeadUnreachableError as error:
        raise ConfigError(f"cluster.connect_to: {error}") from error


async def _source(config: Config) -> tuple[Path, str]:
    """Where the base model is, and its fingerprint."""
    source = await asyncio.to_thread(source_of, config.model.base_model_path, False)
    return source, await asyncio.to_thread(fingerprint_of, source)


def backend_of(node: Node, backend: Backend, default_adapter: str) -> Backend:
    """The backend of a server that is this node."""
    return join(backend, node, ClusterCollection(node, default_adapter))


def begin_serving(node: Node, config: Config, services: Services, port: int) -> None:
    """Says that the HTTP server listens on `port`."""

    def where() -> str:
        return f"{config.server.scheme}://{config.cluster.advertise or f'{_host(config)}:{port}'}"

    node.serve(where, partial(_report, services))


def _host(config: Config) -> str:
    """The host at which the others reach this node."""
    host = config.server.host
    if config.cluster.connect_to is not None:
        host = own_address(config.cluster.connect_to)
    elif host in EVERY_INTERFACE:
        host = outward_address(host)
    return in_url(host)


def _report(services: Services) -> NodeReport:
    stats, cluster = services.engine.stats(), services.cluster
    closed = services.lifecycle.drain_begun.is_set() or services.lifecycle.asleep or stats.paused
    closed |= stats.machine.relief is Relief.REQUESTS or bool(stats.stuck)
    return NodeReport(stats.alive and stats.ready and not closed, cluster.own.load.tokens if cluster is not None else 0)


# -- the base model of a replica -----------------------------------------------------------------


async def _with_base(config: Config, head_address: str, folder: Path) -> Config:
    """The configuration with the base model of the cluster: the one that it names, if it is the same, else the bundled
    one, or one that is fetched from the head into `folder`."""
    path = config.model.base_model_path
    own = await asyncio.to_thread(lambda: fingerprint_of(source_of(path)))
    asked = None if path is None else own
    answer = await _patiently(config, head_address, asked)
    if answer.base.fingerprint == own:
        return config
    with locked_folder(folder) as state:
        base = state / f"base-{answer.base.fingerprint}"
        await fetch_base(head_address, _token(config), answer, base)
    if await asyncio.to_thread(fingerprint_of, base) != answer.base.fingerprint:
        raise ConfigError(f"{base} is not the base model of the head; remove the folder and start again")
    model = config.model.model_copy(update={"base_model_path": str(base)})
    names = config.server.served_model_name or (answer.base.name,)
    server = config.server.model_copy(update={"served_model_name": names})
    return config.model_copy(update={"model": model, "server": server})


async def _patiently(config: Config, head_address: str, fingerprint: str | None) -> Joined:
    """What the head says, which may be starting too."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return await ask_head(head_address, _token(config), "", fingerprint)
        except HeadUnreachableError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"cluster.connect_to: {error}") from error
        await asyncio.sleep(_AGAIN_S)


def _token(config: Config) -> str:
    if config.cluster.token is None:
        raise ConfigError(
            "cluster.token: a node that joins a cluster needs its token; set MLX_PARALLM_CLUSTER_TOKEN to the text in "
            "the file that the head names when it is ready"
        )
    return config.cluster.token.get_secret_value()


def _replica_folder(config: Config) -> Path:
    """Of this replica alone: several may run on one machine."""
    return config.cluster.state_dir / f"replica-{config.server.port}"


def _trainer_folder(config: Config) -> Path:
    return config.cluster.state_dir / f"trainer-{config.adapters.default_adapter}"
