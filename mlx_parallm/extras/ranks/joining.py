"""Connects the ranks that `mlx.launch` has started: the group of `mx.distributed`, and two TCP connections from every
other rank to rank 0, one for operations and one by which each side sees that the other is alive.

Rank 0 tells the others its host, its port and a token through the group itself, so nothing has to be configured.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.ranks.wire import frame, receive_greeting

_LAUNCHED = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Environment variables of which a launcher sets one: mlx.launch, or mpirun."""

_JOIN_TIMEOUT_S = 120.0
_GREETING_TIMEOUT_S = 5.0
_ADDRESS_BYTES = 512


@dataclass(frozen=True, slots=True)
class Peer:
    """Another rank, with its two connections."""

    rank: int
    work: socket.socket
    pulse: socket.socket


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks, as one of them sees them. `peers`: of rank 0 all others; of another rank, rank 0."""

    group: mx.distributed.Group
    peers: tuple[Peer, ...]

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which serves HTTP."""
        return self.group.rank() == 0


@dataclass(frozen=True, slots=True)
class _Address:
    host: str
    port: int
    token: str


def is_launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process, maybe as one of several."""
    return any(name in environ for name in _LAUNCHED)


def join(environ: Mapping[str, str] = os.environ) -> Ranks | None:
    """Joins the other ranks; None if this process was not started as one of several.

    Raises:
        ConfigError: they cannot be reached.
    """
    if not is_launched(environ):
        return None
    group = mx.distributed.init()
    if group.size() == 1:
        return None
    try:
        return Ranks(group, _await_peers(group, environ) if group.rank() == 0 else (_connect(group),))
    except OSError as error:
        raise ConfigError(
            f"rank {group.rank()} cannot connect to the other ranks: {error}; check that each machine can reach the "
            "first host of mlx.launch by TCP"
        ) from error


def _await_peers(group: mx.distributed.Group, environ: Mapping[str, str]) -> tuple[Peer, ...]:
    with socket.create_server(("", 0)) as listener:
        listener.settimeout(_JOIN_TIMEOUT_S)
        address = _Address(_host(environ), listener.getsockname()[1], secrets.token_hex(16))
        _share_address(group, address)
        found: dict[tuple[int, str], socket.socket] = {}
        while len(found) < 2 * (group.size() - 1):
            connection, _ = listener.accept()
            try:
                found[_greeted(connection, address.token)] = connection
            except (ValueError, KeyError, TypeError, OSError):  # a stranger: it does not know the token
                connection.close()
    return tuple(Peer(rank, found[rank, "work"], found[rank, "pulse"]) for rank in range(1, group.size()))


def _greeted(connection: socket.socket, token: str) -> tuple[int, str]:
    """Who has connected, and for what."""
    connection.settimeout(_GREETING_TIMEOUT_S)
    greeting = json.loads(receive_greeting(connection))
    if not secrets.compare_digest(str(greeting["token"]), token):
        raise ValueError("the token is wrong")
    _prepare(connection)
    return int(greeting["rank"]), str(greeting["purpose"])


def _connect(group: mx.distributed.Group) -> Peer:
    address = _share_address(group, None)
    work, pulse = (_open(group.rank(), address, purpose) for purpose in ("work", "pulse"))
    return Peer(0, work, pulse)


def _open(rank: int, address: _Address, purpose: str) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), timeout=_JOIN_TIMEOUT_S)
    connection.sendall(frame(json.dumps({"rank": rank, "purpose": purpose, "token": address.token}).encode()))
    _prepare(connection)
    return connection


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _share_address(group: mx.distributed.Group, address: _Address | None) -> _Address:
    """The address of rank 0, which alone gives it."""
    text = b"" if address is None else json.dumps([address.host, address.port, address.token]).encode()
    shared = mx.distributed.all_sum(mx.array(list(text.ljust(_ADDRESS_BYTES, b"\0")), mx.int32), group=group)
    numbers: list[int] = shared.tolist()  # type: ignore[assignment]
    return _Address(*json.loads(bytes(numbers).rstrip(b"\0")))


def _host(environ: Mapping[str, str]) -> str:
    """The address by which the others reach this machine: the one that mlx.launch was given, else its name."""
    if hosts := environ.get("MLX_HOSTFILE"):
        return str(json.loads(Path(hosts).read_text())[0][0]).rpartition(":")[0]
    if coordinator := environ.get("MLX_JACCL_COORDINATOR"):
        return coordinator.rpartition(":")[0]
    return environ.get("NCCL_HOST_IP") or socket.gethostname()
