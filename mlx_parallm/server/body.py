"""Reads a request's body as JSON and validates it. The error about a malformed body says what is wrong.

FastAPI's own body parsing is not used: it reads bodies of any size, does not take the content type that `curl -d`
sends, and its errors echo input that may not be encodable.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.fields import IgnoredFields, OpenBody
from mlx_parallm.server.errors import BodyTimeoutError, BodyTooLargeError, MediaTypeError
from mlx_parallm.server.limits import SMALL_BYTES
from mlx_parallm.server.request_log import client_of, record_of
from mlx_parallm.server.services import Services, ServicesDep

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

# `curl -d '{…}'` sends the second type. A browser may send it to another site without a preflight request, so it is
# accepted only because the Host and Origin checks run first.
JSON_TYPES = frozenset({"application/json", "application/x-www-form-urlencoded"})
BYTES_PER_VALUE = 16
"""The largest number of JSON values in a body is the size limit divided by this: a million at 16 MiB."""
_MAX_DIGITS = 12


@dataclass(frozen=True, slots=True)
class BodyModel:
    """The body of a route: its schema, and whether it is required. `openapi.describe` reads it."""

    model: type[BaseModel]
    required: bool


def json_body(
    model: type[M], required: bool = True, media_types: Collection[str] | None = JSON_TYPES
) -> Callable[..., Awaitable[M]]:
    """A FastAPI dependency that returns the request's body as `model`. Unless `required`, no body counts as `{}`. With
    `media_types` None, it may say that it is of any type, or none.

    The dependency's attribute `body` is its `BodyModel`. A model whose attribute `LIST` names a field takes a list for
    the value of that field.
    """

    async def parsed(request: Request, services: ServicesDep) -> M:
        headers = request.headers
        if not required and headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return model()
        ignores = issubclass(model, OpenBody) and not services.config.strict_fields
        ignored = record_of(request.scope).ignored if ignores else None
        given = _fields_of_headers(model, request)
        most = services.config.max_body_bytes
        return await read_body(request, services, lambda raw: parse_body(model, raw, most, ignored, given), media_types)

    parsed.body = BodyModel(model, required)  # type: ignore[attr-defined]
    return parsed


async def read_body(
    request: Request,
    services: Services,
    parse: Callable[[bytes], T],
    media_types: Collection[str] | None = JSON_TYPES,
    inflates: bool = True,
) -> T:
    """Reads the body, and returns what `parse` makes of it. A large or compressed body is parsed in a worker thread.

    Args:
        inflates: whether a gzip body is inflated first. Otherwise `parse` gets every body as it was sent.

    Raises:
        MediaTypeError: its type is not one of `media_types`, or it is compressed in another way.
        BodyTooLargeError, BodyTimeoutError: it is too long, or does not arrive in time.
        OverloadedError: other large bodies are being read or parsed.
    """
    most = services.config.max_body_bytes
    length = _check_headers(request, most, media_types)
    gzipped = inflates and _is_compressed(request)
    timeout_s, workers, client = services.config.body_timeout, services.workers, client_of(request.scope)
    if length is not None and length <= SMALL_BYTES and "content-encoding" not in request.headers:
        return parse(await read_bytes(request, most, timeout_s))
    with workers.arriving.hold(client) as add:
        raw = await read_bytes(request, most, timeout_s, add)
        async with workers.large_bodies.hold(client):
            if gzipped:
                raw = await workers.run(most, partial(inflate, raw, most))
                request.state.body_bytes = len(raw)
            return await workers.run(len(raw), partial(parse, raw))


def _check_headers(request: Request, limit: int, media_types: Collection[str] | None) -> int | None:
    """The length that the Content-Length header declares, in bytes; None if it declares none.

    Raises:
        MediaTypeError: the body's type is not one of `media_types`.
        BodyTooLargeError: the declared length is over `limit` bytes.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_types is not None and media_type not in media_types:
        raise MediaTypeError("Send the body as JSON, with the header `Content-Type: application/json`.")
    declared = request.headers.get("content-length", "")
    length = int(declared[:20]) if declared.isdecimal() else None
    if length is not None and length > limit:
        raise _too_large(limit)
    return length


def _is_compressed(request: Request) -> bool:
    """Raises MediaTypeError: the body is compressed in another way than with gzip."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise MediaTypeError("Send the body as it is, or with `Content-Encoding: gzip`.")
    return encoding == "gzip"


def inflate(raw: bytes, limit: int) -> bytes:
    """The content of a gzip body.

    Raises:
        BodyTooLargeError: it is longer than `limit` bytes. No more than that is inflated.
        InvalidRequestError: it is not one whole gzip member.
    """
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        content = inflater.decompress(raw, limit + 1)
    except zlib.error as error:
        raise InvalidRequestError(f"The body is not valid gzip: {error}.") from None
    if len(content) > limit:
        raise _too_large(limit)
    if not inflater.eof or inflater.unused_data:
        raise InvalidRequestError("The body is not valid gzip: it must be one whole member.")
    return content


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is over the limit of {limit} bytes.")


async def read_bytes(
    request: Request, most: int, timeout_s: float, add: Callable[[int], Awaitable[None]] | None = None
) -> bytes:
    """Reads the body, which every route does with this, and keeps its length in `request.state.body_bytes`.

    Args:
        most: bytes; reading stops at the chunk that exceeds them.
        timeout_s: seconds within which the whole body must arrive.
        add: called with the length of each chunk, and awaited before the next one is read. See `ArrivingBodies`.

    Raises:
        BodyTimeoutError, BodyTooLargeError: it arrives too late, or is too long.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise _too_large(most)
                if add is not None:
                    await add(len(chunk))
    except TimeoutError:
        raise BodyTimeoutError(f"The body did not arrive within {timeout_s:g} seconds.") from None
    request.state.body_bytes = len(body)
    return bytes(body)


def _fields_of_headers(model: type[BaseModel], request: Request) -> dict[str, object]:
    """The fields that the request's headers give. They mark it for collection, because they mean nothing otherwise.

    A number that cannot be read is given as text, so that the error about it names the field.
    """
    headers: Mapping[str, tuple[str, type]] = getattr(model, "HEADERS", {})
    given: dict[str, object] = {}
    for header, (name, kind) in headers.items():
        if (text := request.headers.get(header)) is not None:
            number = kind is int and text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
            given[name] = int(text) if number else text
    return {"collect_trajectory": True, **given} if given else {}


def parse_body(
    model: type[M],
    raw: bytes,
    max_body_bytes: int,
    ignored: IgnoredFields | None = None,
    given: Mapping[str, object] = MappingProxyType({}),
) -> M:
    """Parses `raw` and validates it as `model`. If it is large, call it in a worker thread.

    The JSON parser holds the interpreter lock until it has parsed the whole body, so a body with too many values would
    stop all other threads. Therefore the values are counted first.

    Args:
        ignored: collects the unknown fields. They are refused if it is None, or if the body has `collect_trajectory`,
            so that a mistyped field does not pass unnoticed. They are not if only headers mark the request for
            collection, because such a client sends what it always does.
        given: fields that the request's headers give, for those that the body does not have.

    Raises:
        BodyTooLargeError: the body has more than `max_body_bytes // BYTES_PER_VALUE` JSON values.
        InvalidRequestError: the body is not a JSON object, or a field is wrong; `param` names the field.
    """
    most = max_body_bytes // BYTES_PER_VALUE
    if len(raw) > most and count_values(raw, most) > most:
        raise BodyTooLargeError(
            f"The body has more than {most} JSON values (numbers, texts, lists and objects). Send less in one request."
        )
    value = _from_json(raw)  # NaN and Infinity pass, so that the error about a field names it
    if isinstance(value, list) and (name := getattr(model, "LIST", "")):
        value = {name: value}
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    context = None if value.get("collect_trajectory") else ignored
    checked = validated(model, {**given, **value}, context)
    if b"NaN" in raw or b"Infinity" in raw:  # in a text or, which is refused, in a field that is ignored
        _from_json(raw, allow_inf_nan=False)
    return checked


def count_values(raw: bytes, enough: int) -> int:
    """Counts the JSON values in `raw` without parsing it; an empty list or object counts twice. If the texts alone,
    with the fields' names, are more than `enough`, only they are counted. It takes about 4 ns a byte."""
    bare = raw.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in raw else raw
    texts = bare.count(b'"') // 2
    if texts > enough:
        return texts
    structure = b"".join(bare.split(b'"')[::2])
    return structure.count(b",") + structure.count(b"[") + structure.count(b"{")


def _from_json(raw: bytes, allow_inf_nan: bool = True) -> object:
    try:
        value: object = from_json(raw, allow_inf_nan=allow_inf_nan)
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON in UTF-8: {error}.") from None
    return value


def validated(model: type[M], value: object, ignored: IgnoredFields | None = None) -> M:
    """A body, or a part of one, as `model`. Raises InvalidRequestError if a field is wrong; `param` names the field."""
    try:
        return model.model_validate(value, context=ignored)
    except ValidationError as error:
        raise first_fault(error) from None


def first_fault(error: ValidationError) -> InvalidRequestError:
    """The first problem that pydantic found, with the path of its field as `param`."""
    fault = error.errors(include_url=False, include_input=False)[0]
    named = fault.get("ctx", {}).get("field")
    path = fault["loc"] if named is None else (*fault["loc"], named)
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
    return InvalidRequestError(f"{param}: {fault['msg']}" if param else fault["msg"], param=param or None)
