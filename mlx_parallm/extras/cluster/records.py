"""What nodes keep in NATS, as JSON."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from mlx_parallm.extras.cluster.cards import NodeInfo, SharedVersion

T = TypeVar("T")

_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (NodeInfo, SharedVersion)}


def to_json(record: NodeInfo | SharedVersion) -> bytes:
    """A record as JSON."""
    return _ADAPTERS[type(record)].dump_json(record)


def from_json(kind: type[T], data: bytes) -> T | None:
    """A record from JSON; None if another version of this package wrote it in a form that is not known here."""
    try:
        record: T = _ADAPTERS[kind].validate_json(data)
    except ValidationError:
        return None
    return record
