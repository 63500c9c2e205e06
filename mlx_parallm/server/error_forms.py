"""How each API writes an error. The path of a request says to which API it belongs, so errors of middlewares and of
routes that do not exist have the form that the client reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from mlx_parallm.server.api.fields import WireOutput

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


THREAD_NOT_FOUND = "thread_not_found"
"""The code by which Anthropic's SDK is told to send a conversation whole."""


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
