"""The address at which the server listens, and its certificate. They are checked before the model is loaded, so this
imports no routes."""

from __future__ import annotations

import socket
import ssl

from mlx_parallm.config import ServerConfig
from mlx_parallm.errors import ConfigError

BACKLOG = 2048
"""Connections that the system keeps until the server accepts them."""


def bind(host: str, port: int) -> socket.socket:
    """Opens a listening socket. Raises ConfigError if the address is in use or does not belong to this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # Accepted sockets inherit this option. asyncio sets it only on sockets whose protocol number is given. Without
        # it, Nagle's algorithm and delayed ACKs delay the body on a reused connection by 40 ms.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another host or port") from error


def check_certificate(config: ServerConfig) -> None:
    """Raises ConfigError if HTTPS is configured and its files or its password cannot be used. uvicorn reads them once
    more."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise ConfigError("ssl_keyfile: set ssl_certfile too, the certificate of that key")
        return
    password = config.ssl_keyfile_password
    secret = "" if password is None else password.get_secret_value()  # with None, OpenSSL asks on the terminal
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile, secret)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or str(error)
        raise ConfigError(
            f"ssl_certfile, ssl_keyfile or ssl_keyfile_password: the certificate cannot be used: {reason}"
        ) from error
