"""Request body → JSON → wire model, with every malformed body answered by name.

FastAPI's own body parsing is not used: it reads bodies of any size, takes any content type as JSON
when asked leniently, and echoes input that cannot be encoded again.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from mlx_parallm.errors import InvalidRequestError, UnknownModelError
from mlx_parallm.server.errors import BodyTimeoutError, BodyTooLargeError, MediaTypeError
from mlx_parallm.server.exchange import exchange_of
from mlx_parallm.server.services import Services, ServicesDep
from mlx_parallm.server.shares import client_of
from mlx_parallm.server.wire.base import OpenBody
from mlx_parallm.server.wire.ignored import IgnoredFields
from mlx_parallm.server.workers import SMALL_BYTES

M = TypeVar("M", bound=BaseModel)
Pace = Callable[[int], Awaitable[None]]

OPEN = "x-open"
"""Between `request_body` and `openapi.describe`: whether fields that are not declared are taken."""

# `curl -d '{…}'` sends the second one. Browsers may send it across sites without asking, so it is
# taken only because the Host/Origin check has come first.
JSON_TYPES = frozenset({"application/json", "application/x-www-form-urlencoded"})
BYTES_PER_VALUE = 16
"""A body of the greatest size may have one JSON value for so many bytes: a million at 16 MiB."""
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def json_body(model: type[M], required: bool = True) -> Callable[..., Awaitable[M]]:
    """A FastAPI dependency: the request's body as `model`; where it is not `required`, none is the same as `{}`."""

    async def parsed(request: Request, services: ServicesDep) -> M:
        if not required and _has_no_body(request):
            return model()
        check_media_type(request)
        check_declared_length(request, services.settings.max_body_bytes)
        ignores = issubclass(model, OpenBody) and not services.settings.strict_fields
        ignored = exchange_of(request.scope).ignored if ignores else None
        if _declared_length(request, unknown=SMALL_BYTES + 1) <= SMALL_BYTES:
            return parse_body(model, await _read(request, services), ignored)
        async with services.workers.large_body(client_of(request.scope)):
            raw = await _read(request, services, services.workers.pace)
            return await services.workers.run(len(raw), partial(_parse_large, model, raw, services, ignored))

    return parsed


def request_body(model: type[BaseModel], required: bool = True) -> dict[str, Any]:
    """The OpenAPI `requestBody` of a route that uses `json_body`; `openapi.py` lifts its `$defs` and reads `OPEN`."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": required, "content": content, OPEN: issubclass(model, OpenBody)}}


def _has_no_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers


def check_media_type(request: Request) -> None:
    """Raises MediaTypeError unless the body is sent as JSON, or as curl's default type."""
    sent = request.headers.get("content-type", "")
    if sent.partition(";")[0].strip().lower() not in JSON_TYPES:
        raise MediaTypeError("Send the body as JSON, with the header `Content-Type: application/json`.")


def check_declared_length(request: Request, limit: int) -> None:
    """Raises BodyTooLargeError: the header `Content-Length` is over `limit` bytes."""
    if _declared_length(request, unknown=0) > limit:
        raise _too_large(limit)


def _declared_length(request: Request, unknown: int) -> int:
    declared = request.headers.get("content-length", "")
    return int(declared[:20]) if declared.isdecimal() else unknown


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is over the limit of {limit} bytes.")


async def _read(request: Request, services: Services, pace: Pace | None = None) -> bytes:
    """The body. `request.state.body_bytes` tells from now on how long it is."""
    limit_s = services.settings.body_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            raw = await read_body(request, services.settings.max_body_bytes, pace)
    except TimeoutError:
        raise BodyTimeoutError(f"The body did not arrive within {limit_s:g} seconds.") from None
    request.state.body_bytes = len(raw)
    return raw


async def read_body(request: Request, limit: int, pace: Pace | None = None) -> bytes:
    """The body, never holding more than `limit` bytes and one chunk. Raises BodyTooLargeError: it is longer.

    Args:
        pace: waits before more is read; it is told how many bytes have just come.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
        if pace is not None:
            await pace(len(chunk))
    return bytes(body)


def _parse_large(model: type[M], raw: bytes, services: Services, ignored: IgnoredFields | None) -> M:
    """In a worker thread. Python's parser holds the interpreter lock for the whole body, about 100 ns for each value:
    a thread alone would not keep it from stopping everything else, so the values are counted first.

    Raises:
        BodyTooLargeError: the body has more than one JSON value for each `BYTES_PER_VALUE` bytes that it may have.
    """
    most = services.settings.max_body_bytes // BYTES_PER_VALUE
    if len(raw) > most and count_values(raw, most) > most:
        raise BodyTooLargeError(
            f"The body has more than {most} JSON values (numbers, texts, lists and objects). Send less in one request."
        )
    return parse_body(model, raw, ignored)


def count_values(raw: bytes, enough: int) -> int:
    """JSON values in `raw`, an empty list or object counted twice; any number over `enough` where there are more.
    Costs about 4 ns a byte."""
    bare = raw.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in raw else raw
    texts = bare.count(b'"') // 2
    if texts > enough:
        return texts
    structure = b"".join(bare.split(b'"')[::2])
    return structure.count(b",") + structure.count(b"[") + structure.count(b"{")


def parse_body(model: type[M], raw: bytes, ignored: IgnoredFields | None = None) -> M:
    """`raw` as `model`. `ignored` collects the unknown fields; they are refused without it, and in a request that is
    collected for training, where a mistyped field must not go unnoticed.

    Raises:
        InvalidRequestError: not JSON, not an object, or a field is wrong; `param` names it.
        UnknownModelError: `model` is not even text.
    """
    text = _decode(raw)
    not_json: list[str] = []

    def constant(name: str) -> float:
        """NaN and Infinity go on to the model, which refuses them by field name."""
        not_json.append(name)
        return float(name)

    value = _loads(text, constant)
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    if SURROGATE_ESCAPE.search(text):
        _refuse_lone_surrogates(value)
    try:
        checked = model.model_validate(value, context=None if value.get("collect_trajectory") else ignored)
    except ValidationError as error:
        raise first_fault(error) from None
    if not_json:
        raise InvalidRequestError(f"{not_json[0]} is not valid JSON.")
    return checked


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequestError("The body is not valid UTF-8.") from None


def _loads(text: str, constant: Callable[[str], Any]) -> object:
    try:
        return json.loads(text, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            f"The body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise InvalidRequestError("The body has an integer with too many digits.") from None


def _refuse_lone_surrogates(fields: dict[str, Any]) -> None:
    """Text that no UTF-8 encoder takes would fail later, wherever it is first echoed."""
    for name, value in fields.items():
        if not _encodable(name):
            raise InvalidRequestError("A field's name has a lone surrogate.")
        if not _encodable(value):
            kind = UnknownModelError if name == "model" else InvalidRequestError
            raise kind(f"{name[:100]}: text with a lone surrogate is not valid Unicode.", param=name)


def _encodable(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    return True


def first_fault(error: ValidationError) -> InvalidRequestError:
    """What a client is told of a body that does not fit its model."""
    fault = error.errors(include_url=False, include_input=False)[0]
    named = fault.get("ctx", {}).get("field")
    path = (*fault["loc"], named) if named else fault["loc"]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
    return InvalidRequestError(f"{param}: {fault['msg']}" if param else fault["msg"], param=param or None)
