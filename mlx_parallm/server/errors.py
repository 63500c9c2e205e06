"""How exceptions become HTTP errors: one table of rules, the forms in which each API writes an error, and the handlers
that apply both.

Every error body is OpenAI's `{"error": {"message", "type", "param", "code"}}`, or has the form of the API that the path
belongs to, so that errors of middlewares and of routes that do not exist have the form that the client reads. A 5xx
answer never shows paths, addresses or traces: if the exception's text may have any, its rule has a message that is sent
in place of the text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Literal

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_parallm.errors import (
    AbortedError,
    AdapterFileError,
    AdapterUnavailableError,
    ConflictError,
    ContextLengthError,
    DeviceHungError,
    DeviceMemoryError,
    EngineDeadError,
    EngineError,
    ModelUnavailableError,
    NodeFailedError,
    OverloadedError,
    QueueFullError,
    QueueTimeoutError,
    RankLostError,
    RequestError,
    RoleError,
    StepFailedError,
    StorageError,
    TrainingDisabledError,
    UnknownModelError,
    UnknownTrajectoryError,
)
from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.request_log import record_of

_log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
THREAD_NOT_FOUND = "thread_not_found"
"""The code by which Anthropic's SDK is told to send a conversation whole."""


# -- errors of HTTP ------------------------------------------------------------------------------


class ApiKeyError(RequestError):
    """The API key is missing or wrong."""


class ForbiddenOriginError(RequestError):
    """The Host or Origin header is not one that the server accepts."""


class MalformedPathError(RequestError):
    """The path has control characters."""


class FramingError(RequestError):
    """The headers say in two ways where the body ends."""


class HeadersTooLargeError(RequestError):
    """The headers are longer than the server takes."""


class UnknownRouteError(RequestError):
    """There is no route for that path."""


class MethodError(RequestError):
    """There are routes for that path, but none for that method."""

    def __init__(self, allowed: Set[str]) -> None:
        self.allowed = ", ".join(sorted(allowed | {"HEAD"} if "GET" in allowed else allowed))
        super().__init__(f"This path takes {self.allowed} only.")


class BodyTooLargeError(RequestError):
    """The body is longer than the server accepts."""


class BodyTimeoutError(RequestError):
    """The body did not arrive in time."""


class MediaTypeError(RequestError):
    """The body's content type is not JSON."""


class UnknownResponseError(RequestError):
    """No response with that id is stored."""


class UnknownThreadError(RequestError):
    """A conversation that the server should have kept is not kept."""


class ExpiredError(RequestError):
    """A session, a model or the result of an operation is not known, or not any more."""


class DrainingError(EngineError):
    """The server is shutting down and accepts no new generation requests."""


class InferenceDisabledError(EngineError):
    """The server only trains and accepts no generation requests."""


class AsleepError(EngineError):
    """The server is asleep and accepts no generation requests until POST /wake_up."""


class ShortMemoryError(EngineError):
    """The machine is short of memory, so the server accepts no generation requests until it is not."""

    retry_after_s = 10

    def __init__(self, shortage: str) -> None:
        super().__init__(f"The server's machine is short of memory ({shortage}); try again later.")


class NotReadyError(EngineError):
    """The server runs but is not ready for requests."""


# -- the rules -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """The HTTP form of one kind of exception. If `message` is None, the exception's own text is sent."""

    status: int
    code: str | None = None
    message: str | None = None


RULES: Mapping[type[Exception], ErrorRule] = {
    RequestError: ErrorRule(400),
    AdapterFileError: ErrorRule(400, "invalid_adapter"),
    ContextLengthError: ErrorRule(400, "context_length_exceeded"),
    MalformedPathError: ErrorRule(400, "malformed_path"),
    FramingError: ErrorRule(400, "ambiguous_body_length"),
    UnknownRouteError: ErrorRule(404, "not_found"),
    MethodError: ErrorRule(405, "method_not_allowed"),
    ApiKeyError: ErrorRule(401, "invalid_api_key"),
    ForbiddenOriginError: ErrorRule(403, "forbidden_origin"),
    RoleError: ErrorRule(403, "insufficient_role"),
    UnknownModelError: ErrorRule(404, "model_not_found"),
    UnknownTrajectoryError: ErrorRule(404, "trajectory_not_found"),
    UnknownResponseError: ErrorRule(404, "response_not_found"),
    UnknownThreadError: ErrorRule(404, THREAD_NOT_FOUND),
    ConflictError: ErrorRule(409, "conflict"),
    TrainingDisabledError: ErrorRule(409, "training_disabled"),
    BodyTimeoutError: ErrorRule(408, "body_timeout"),
    ExpiredError: ErrorRule(410, "expired"),
    BodyTooLargeError: ErrorRule(413, "body_too_large"),
    MediaTypeError: ErrorRule(415, "unsupported_media_type"),
    OverloadedError: ErrorRule(429, "rate_limit_exceeded"),
    HeadersTooLargeError: ErrorRule(431, "headers_too_large"),
    StepFailedError: ErrorRule(500, "step_failed", "The step that carried this request failed; try again."),
    QueueTimeoutError: ErrorRule(503, "queue_timeout"),
    DeviceMemoryError: ErrorRule(
        503,
        "out_of_memory",
        "The device ran out of memory for this request; try again later, or with a shorter prompt.",
    ),
    NodeFailedError: ErrorRule(
        503, "node_failed", "The node that was answering this request has failed; send the request again."
    ),
    AbortedError: ErrorRule(503, "aborted", "The operator ended this request with POST /pause; try again."),
    EngineError: ErrorRule(500, "engine_error", "The engine failed this request; try again."),
    StorageError: ErrorRule(507, "storage_failed"),
    QueueFullError: ErrorRule(503, "training_queue_full"),
    ModelUnavailableError: ErrorRule(503, "model_unavailable"),
    AdapterUnavailableError: ErrorRule(
        503,
        "adapter_unavailable",
        "The weights of this adapter version can no longer be read; load it again.",
    ),
    DeviceHungError: ErrorRule(503, "engine_dead"),
    RankLostError: ErrorRule(503, "engine_dead"),
    EngineDeadError: ErrorRule(503, "engine_dead", "The engine is not running; restart the server."),
    DrainingError: ErrorRule(503, "draining", "The server is shutting down."),
    InferenceDisabledError: ErrorRule(
        503,
        "inference_disabled",
        "This server only trains; send the request to one that is not in training_only mode.",
    ),
    AsleepError: ErrorRule(503, "asleep", "The server is asleep; POST /wake_up, then try again."),
    ShortMemoryError: ErrorRule(503, "memory_pressure"),
    NotReadyError: ErrorRule(503, "not_ready", "The server is not ready for requests."),
    Exception: ErrorRule(500, "internal_error", "The server failed; its log says why."),
}


def rule_of(kind: type[Exception]) -> ErrorRule:
    """The rule of the class, or of its nearest ancestor that has one."""
    return next(RULES[ancestor] for ancestor in kind.__mro__ if ancestor in RULES)


def code_of(error: Exception) -> str:
    """The error's name in the request log."""
    rule = rule_of(type(error))
    return rule.code or _type_of(rule.status)


def error_body(error: Exception) -> ErrorBody:
    rule = rule_of(type(error))
    return wire_error(rule.status, rule.code, rule.message or str(error), getattr(error, "param", None))


def wire_error(status: int, code: str | None, message: str, param: str | None = None) -> ErrorBody:
    return ErrorBody(error=ErrorDetail(message=message, type=_type_of(status), param=param, code=code))


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


# -- the form of each API ------------------------------------------------------------------------

MESSAGES = "/v1/messages"
"""The path of Anthropic's Messages API, and the beginning of its other paths."""
TINKER, OLLAMA = "/api/v1", "/api"
"""The beginnings of the paths of these APIs."""


class ErrorDetail(WireOutput):
    """The error itself."""

    message: str
    """What is wrong and what to change."""
    type: str
    """`invalid_request_error`, `rate_limit_error` or `server_error`."""
    param: str | None
    """The field at fault."""
    code: str | None
    """The error code, for programs; null for a malformed field."""


class ErrorBody(WireOutput):
    """The body of every answer that is not a success, as OpenAI writes it."""

    error: ErrorDetail
    """What went wrong."""


MessagesErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
]
MESSAGES_TYPES: Mapping[int, MessagesErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class MessagesErrorFacts(WireOutput):
    """What programs read of an error."""

    error_code: str
    """Always `thread_not_found`."""


class MessagesErrorDetail(WireOutput):
    """The error itself."""

    type: MessagesErrorType
    """What kind of error it is; the status says the same."""
    message: str
    """What is wrong and what to change."""
    details: MessagesErrorFacts | None = None
    """Only if the conversation has to be sent whole."""


class MessagesError(WireOutput):
    """The body of every answer that is not a success, as Anthropic writes it. Also the last event of a stream that
    failed."""

    type: Literal["error"]
    error: MessagesErrorDetail
    """What went wrong."""

    @property
    def event_name(self) -> str:
        return self.type


class OllamaError(WireOutput):
    """The body of every answer that is not a success, as Ollama writes it. Also the last line of a stream that
    failed."""

    error: str
    """What is wrong and what to change."""


def messages_error(status: int, body: ErrorBody) -> MessagesError:
    """The error in Anthropic's form."""
    other: MessagesErrorType = "api_error" if status >= 500 else "invalid_request_error"
    facts = {"details": MessagesErrorFacts(error_code=THREAD_NOT_FOUND)} if body.error.code == THREAD_NOT_FOUND else {}
    detail = MessagesErrorDetail(type=MESSAGES_TYPES.get(status, other), message=_message(body), **facts)
    return MessagesError(type="error", error=detail)


def ollama_error(_: int, body: ErrorBody) -> OllamaError:
    """The error in Ollama's form."""
    return OllamaError(error=_message(body))


def _message(body: ErrorBody) -> str:
    """The message for a form that has no field for the parameter: it names it."""
    error = body.error
    named = error.param is None or error.param in error.message
    return error.message if named else f"{error.param}: {error.message}"


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How one API writes errors. `write` makes the body, a `model`, of a status and OpenAI's body. `id_header` is the
    API's own header with the id of the request; None: it has no other than the server's."""

    model: type[WireOutput]
    write: Callable[[int, ErrorBody], WireOutput]
    id_header: str | None = None


OPENAI = ErrorForm(ErrorBody, lambda _, body: body)
FORMS: Mapping[str, ErrorForm] = {
    MESSAGES: ErrorForm(MessagesError, messages_error, id_header="request-id"),
    TINKER: OPENAI,
    OLLAMA: ErrorForm(OllamaError, ollama_error),
}
"""The forms of other APIs than OpenAI's, by the beginning of their paths. The first that fits counts."""


def form_of(path: str) -> ErrorForm:
    """The form of the API that the path of a request belongs to."""
    return next((form for start, form in FORMS.items() if f"{path}/".startswith(f"{start}/")), OPENAI)


# -- responses -----------------------------------------------------------------------------------


class ErrorResponse(Response):
    """A response with an error body in the form of the API that the request's path belongs to. Sending it writes the
    error's code into the request's record."""

    def __init__(self, error: ErrorBody, status: int, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(None, status, headers, media_type="application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).error = self._error.error.code or self._error.error.type
        self.body = form_of(scope["path"]).write(self.status_code, self._error).json_text().encode("utf-8")
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: Exception) -> ErrorResponse:
    """The response for any exception, with the headers that belong to its status."""
    status = rule_of(type(error)).status
    return ErrorResponse(error_body(error), status, _headers(status, error))


def unexpected_response(error: Exception) -> ErrorResponse:
    """The response for an exception that no handler expected. uvicorn logs such an exception and closes the connection,
    so the response says so. Otherwise the client would send its next request on the closed connection."""
    response = error_response(error)
    response.headers["connection"] = "close"
    return response


def install_handlers(app: FastAPI) -> None:
    """Makes `app` answer the project's exceptions with error bodies. `EntryMiddleware` answers all other exceptions."""
    for kind in (RequestError, EngineError):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(RequestValidationError, _answer_parameter)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)


async def _answer(_: Request, error: Exception) -> Response:
    if type(error) is EngineError:  # whose text the client does not get
        _log.error("%s", error)
    return error_response(error)


async def _answer_http(_: Request, error: Exception) -> Response:
    """Answers what Starlette refuses. `entry.Guard` has refused unknown paths and methods already."""
    assert isinstance(error, HTTPException)
    answer = wire_error(error.status_code, "http_error", "The request cannot be served.")
    return ErrorResponse(answer, error.status_code, error.headers)


async def _answer_parameter(_: Request, error: Exception) -> Response:
    """Answers a wrong parameter of the path or the query. Bodies are validated in `body`."""
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    return error_response(RequestError(f"{fault['loc'][-1]}: {fault['msg']}", param=str(fault["loc"][-1])))


async def _answer_nobody(_: Request, __: Exception) -> Response:
    """The client disconnected, so nobody reads this response."""
    return Response(status_code=499)


def _headers(status: int, error: Exception) -> dict[str, str]:
    if isinstance(error, MethodError):
        return {"allow": error.allowed}
    if status == 401:
        return {"www-authenticate": "Bearer"}
    if status == 408 or isinstance(error, FramingError):
        return {"connection": "close"}  # the rest of the body would be read as the next request
    if status in (403, 409) or isinstance(error, InferenceDisabledError | AsleepError):
        return {"x-should-retry": "false"}  # otherwise OpenAI's clients retry a 409 and a 5xx
    if status in (429, 503):
        return {"retry-after": str(getattr(error, "retry_after_s", RETRY_AFTER_S))}
    return {}
