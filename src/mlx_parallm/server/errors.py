"""Error → status and wire code: the one table, and the handlers that use it.

Every error body is OpenAI's `{"error": {"message", "type", "param", "code"}}`. A rule with its own
message hides what the exception says: a 5xx never shows paths, addresses or traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlx_parallm.errors import (
    AbortedError,
    AdapterFileError,
    AdapterUnavailableError,
    ConflictError,
    ContextLengthError,
    DeviceMemoryError,
    EngineDeadError,
    EngineError,
    OverloadedError,
    QueueTimeoutError,
    RequestError,
    StepFailedError,
    StorageError,
    TrainingDisabledError,
    UnknownModelError,
    UnknownTrajectoryError,
)
from mlx_parallm.server.exchange import exchange_of
from mlx_parallm.server.wire.common import ErrorBody, ErrorDetail

RETRY_AFTER_S = 1


class ApiKeyError(RequestError):
    """The request has no key, or a wrong one."""


class ForbiddenOriginError(RequestError):
    """The Host or Origin header names somebody else's site."""


class BodyTooLargeError(RequestError):
    """The body is longer than the server takes."""


class BodyTimeoutError(RequestError):
    """The body came too slowly."""


class MediaTypeError(RequestError):
    """The body is not sent as JSON."""


class UnknownResponseError(RequestError):
    """No response of that id is stored, or not any more."""


class DrainingError(EngineError):
    """The server is shutting down and takes no new generation requests."""


class InferenceDisabledError(EngineError):
    """The server only trains: it takes no generation requests."""


class AsleepError(EngineError):
    """The server takes no generation requests until somebody wakes it."""


class NotReadyError(EngineError):
    """The server is alive but not to be sent traffic now."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of error looks from outside; `message` None lets the exception speak."""

    status: int
    type: str
    code: str | None = None
    message: str | None = None


RULES: Mapping[type[Exception], Rule] = {
    RequestError: Rule(400, "invalid_request_error"),
    AdapterFileError: Rule(400, "invalid_request_error", "invalid_adapter"),
    ContextLengthError: Rule(400, "invalid_request_error", "context_length_exceeded"),
    ApiKeyError: Rule(401, "invalid_request_error", "invalid_api_key"),
    ForbiddenOriginError: Rule(403, "invalid_request_error", "forbidden_origin"),
    UnknownModelError: Rule(404, "invalid_request_error", "model_not_found"),
    UnknownTrajectoryError: Rule(404, "invalid_request_error", "trajectory_not_found"),
    UnknownResponseError: Rule(404, "invalid_request_error", "response_not_found"),
    ConflictError: Rule(409, "invalid_request_error", "conflict"),
    TrainingDisabledError: Rule(409, "invalid_request_error", "training_disabled"),
    BodyTimeoutError: Rule(408, "invalid_request_error", "body_timeout"),
    BodyTooLargeError: Rule(413, "invalid_request_error", "body_too_large"),
    MediaTypeError: Rule(415, "invalid_request_error", "unsupported_media_type"),
    OverloadedError: Rule(429, "rate_limit_error", "rate_limit_exceeded"),
    StepFailedError: Rule(500, "server_error", "step_failed", "The step that carried this request failed; try again."),
    QueueTimeoutError: Rule(503, "server_error", "queue_timeout"),
    DeviceMemoryError: Rule(
        503,
        "server_error",
        "out_of_memory",
        "The device ran out of memory for this request; try again later, or with a shorter prompt.",
    ),
    AbortedError: Rule(503, "server_error", "aborted", "The operator ended this request by POST /pause; try again."),
    EngineError: Rule(500, "server_error", "engine_error", "The engine failed this request; try again."),
    StorageError: Rule(507, "server_error", "storage_failed"),
    AdapterUnavailableError: Rule(
        503,
        "server_error",
        "adapter_unavailable",
        "This adapter version's weights cannot be read any more; load it again.",
    ),
    EngineDeadError: Rule(503, "server_error", "engine_dead", "The engine is not running; restart the server."),
    DrainingError: Rule(503, "server_error", "draining", "The server is shutting down."),
    InferenceDisabledError: Rule(
        503,
        "server_error",
        "inference_disabled",
        "This server only trains; ask one that is not in training_only mode.",
    ),
    AsleepError: Rule(503, "server_error", "asleep", "The server is asleep; POST /wake_up, then try again."),
    NotReadyError: Rule(503, "server_error", "not_ready", "The server is not ready for requests."),
    Exception: Rule(500, "server_error", "internal_error", "The server failed; its log says why."),
}
HTTP_MESSAGES: Mapping[int, tuple[str, str]] = {
    404: ("not_found", "No such route."),
    405: ("method_not_allowed", "This route does not take that method."),
}


def rule_of(error: Exception) -> Rule:
    """The rule of its class, or of the nearest ancestor that has one."""
    return rule_of_kind(type(error))


def rule_of_kind(kind: type[Exception]) -> Rule:
    return next(RULES[ancestor] for ancestor in kind.__mro__ if ancestor in RULES)


def code_of(error: Exception) -> str:
    """What the request log calls it."""
    rule = rule_of(error)
    return rule.code or rule.type


def error_body(error: Exception) -> ErrorBody:
    """The wire body of any exception."""
    rule = rule_of(error)
    return _body(rule.message or str(error), rule.type, getattr(error, "param", None), rule.code)


class ErrorResponse(Response):
    """An error body; the request log is told its code."""

    def __init__(self, body: ErrorBody, status: int, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(body.json_text(), status, headers, media_type="application/json")
        self._code = body.error.code or body.error.type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange_of(scope).error = self._code
        await super().__call__(scope, receive, send)


def error_response(error: Exception) -> ErrorResponse:
    """The JSON response of any exception, with the headers that its status asks for."""
    status = rule_of(error).status
    return ErrorResponse(error_body(error), status, _headers(status, error))


def unexpected_response(error: Exception) -> ErrorResponse:
    """The response of an exception that nobody handled: uvicorn logs it and closes the connection. A client that would
    use it again is told so, or its next request would be lost."""
    response = error_response(error)
    response.headers["connection"] = "close"
    return response


def install_handlers(app: FastAPI, routes: Sequence[Route]) -> None:
    """Makes every exception of ours that leaves a route, and every routing failure, an error body. `routes`: all of
    them. An exception that is not ours is answered by `ExchangeMiddleware`."""
    for kind in (RequestError, EngineError):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(HTTPException, partial(_answer_http, routes))
    app.add_exception_handler(RequestValidationError, _answer_path)
    app.add_exception_handler(ClientDisconnect, _nobody_listens)


async def _answer(_: Request, error: Exception) -> Response:
    return error_response(error)


async def _answer_http(routes: Sequence[Route], request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = _methods(routes, request.url.path) if error.status_code == 405 else []
    headers = {"allow": ", ".join(allowed)} if allowed else error.headers
    code, message = HTTP_MESSAGES.get(error.status_code, ("http_error", "The request cannot be served."))
    return ErrorResponse(_body(message, "invalid_request_error", None, code), error.status_code, headers)


def _methods(routes: Sequence[Route], path: str) -> list[str]:
    """Of every route that is written as the first one at this path is; Starlette tells the first one's alone."""
    written = next((route.path for route in routes if route.path_regex.match(path)), None)
    methods = {method for route in routes if route.path == written for method in route.methods or ()}
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


async def _answer_path(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    return error_response(RequestError(f"{fault['loc'][-1]}: {fault['msg']}", param=str(fault["loc"][-1])))


async def _nobody_listens(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


def _body(message: str, kind: str, param: str | None, code: str | None) -> ErrorBody:
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def _headers(status: int, error: Exception) -> dict[str, str]:
    if status == 401:
        return {"www-authenticate": "Bearer"}
    if status == 408:
        return {"connection": "close"}  # what is left of the body would be taken for the next request
    if status == 409 or isinstance(error, InferenceDisabledError | AsleepError):
        return {"x-should-retry": "false"}  # the openai clients retry a 409 and a 503 otherwise
    if status in (429, 503):
        return {"retry-after": str(getattr(error, "retry_after_s", RETRY_AFTER_S))}
    return {}
