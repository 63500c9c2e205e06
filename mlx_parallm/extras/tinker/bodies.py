"""Reads the bodies of the Tinker API: JSON, and protobuf for `forward_backward`. Each comes with a digest, by which a
repeated request is known."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from mlx_parallm.extras.tinker.dependencies import TinkerDep
from mlx_parallm.extras.tinker.protobuf import MEDIA_TYPE, LossRequest, loss_request
from mlx_parallm.server.body import parse_body, read_body
from mlx_parallm.server.request_log import record_of
from mlx_parallm.server.services import Services, ServicesDep

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Read(Generic[M]):
    """A body. `digest`: SHA-256 of its bytes. `nbytes`: how many they are."""

    body: M
    digest: bytes
    nbytes: int


def json_of(model: type[M]) -> Callable[..., Awaitable[Read[M]]]:
    """A FastAPI dependency that reads the body as JSON. No body counts as `{}`."""

    async def read(request: Request, services: ServicesDep, _: TinkerDep) -> Read[M]:
        return await read_json(model, request, services)

    return read


async def read_json(model: type[M], request: Request, services: Services) -> Read[M]:
    ignored = None if services.config.strict_fields else record_of(request.scope).ignored
    limit = services.config.max_body_bytes

    def parse(raw: bytes) -> Read[M]:
        return Read(parse_body(model, raw or b"{}", limit, ignored), hashlib.sha256(raw).digest(), len(raw))

    return await read_body(request, services, parse)


async def skip_body(request: Request, services: ServicesDep, _: TinkerDep) -> None:
    """A FastAPI dependency that reads the body and drops it."""
    await read_body(request, services, lambda raw: None)


def is_protobuf(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == MEDIA_TYPE


async def read_loss_request(request: Request, services: Services) -> tuple[LossRequest, bytes, int]:
    """A `ForwardBackwardRequest` with the digest and the length of its bytes. Raises what `loss_request` raises."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    parse = partial(_parse_loss, encoding, services.config.max_body_bytes)
    return await read_body(request, services, parse, {MEDIA_TYPE}, inflates=False)


def _parse_loss(encoding: str, limit: int, raw: bytes) -> tuple[LossRequest, bytes, int]:
    return loss_request(raw, encoding, limit), hashlib.sha256(raw).digest(), len(raw)
