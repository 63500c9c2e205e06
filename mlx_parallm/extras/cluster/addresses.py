"""At which addresses the nodes of a cluster reach each other."""

from __future__ import annotations

import socket

from mlx_parallm.errors import ConfigError

EVERY_INTERFACE = {"0.0.0.0": ("192.0.2.1", "127.0.0.1"), "::": ("2001:db8::1", "::1")}
"""An address that means every interface → one that no machine has (RFC 5737, RFC 3849), and this machine's own."""


def own_address(head: str) -> str:
    """The address of this machine from which it reaches the head at HOST:PORT.

    Raises:
        ConfigError: the head's name is not known.
    """
    host, _, port = head.rpartition(":")
    try:
        return _address_towards(host.strip("[]"), int(port))
    except OSError as error:
        raise ConfigError(f"cluster.connect_to: {head} cannot be reached: {error.strerror or error}") from error


def outward_address(every_interface: str) -> str:
    """The address of this machine in its network, at which a server that listens on every interface is reached."""
    outside, loopback = EVERY_INTERFACE[every_interface]
    try:
        return _address_towards(outside, 9)
    except OSError:  # there is no network
        return loopback


def _address_towards(host: str, port: int) -> str:
    family, kind, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(found)  # a datagram socket sends nothing
        return str(probe.getsockname()[0])


def in_url(host: str) -> str:
    """The host as a URL has it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
