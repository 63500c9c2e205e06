"""How operations travel from rank 0 to the others: JSON behind its length, over TCP.

8 bytes    the length of what follows, little-endian
JSON       one operation, or the greeting of a connection
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Annotated

from pydantic import Discriminator, TypeAdapter

from mlx_parallm.extras.ranks.operations import Operation

_LENGTH = struct.Struct("<Q")
_LONGEST_GREETING = 1 << 10

_operations: TypeAdapter[Operation] = TypeAdapter(Annotated[Operation, Discriminator("kind")])


def encode(operation: Operation) -> bytes:
    """An operation as it is sent."""
    return frame(json.dumps(_operations.dump_python(operation)).encode())


def decode(message: bytes) -> Operation:
    """The operation that `encode` was given, without its length."""
    return _operations.validate_json(message)


def frame(message: bytes) -> bytes:
    """A message behind its length."""
    return _LENGTH.pack(len(message)) + message


def receive(connection: socket.socket, longest: int | None = None) -> bytes:
    """The next message, without its length.

    Raises:
        ConnectionError: the connection has ended, or the message is longer than `longest` bytes.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if longest is not None and length > longest:
        raise ConnectionError(f"a message of {length} bytes came, and {longest} were expected at most")
    return _exactly(connection, length)


def receive_greeting(connection: socket.socket) -> bytes:
    """The first message of a connection, whose sender is not known yet."""
    return receive(connection, _LONGEST_GREETING)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts, missing = [], size
    while missing:
        part = connection.recv(min(missing, 1 << 20))
        if not part:
            raise ConnectionError("the connection was closed")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
