"""The `responses` of routes in the OpenAPI document: what a route answers, and the errors that it may raise."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from mlx_parallm.errors import (
    AbortedError,
    AdapterFileError,
    AdapterUnavailableError,
    ConflictError,
    ContextLengthError,
    DeviceMemoryError,
    EngineDeadError,
    EngineError,
    GrammarError,
    ModelUnavailableError,
    OverloadedError,
    QueueTimeoutError,
    StepFailedError,
    TrainingDisabledError,
    UnknownModelError,
)
from mlx_parallm.server.errors import AsleepError, DrainingError, InferenceDisabledError, ShortMemoryError, rule_of
from mlx_parallm.server.http.request_log import LORA_ADAPTER

Kind = type[Exception]

LORA_ADAPTER_HEADER: dict[str, Any] = {
    "description": "The adapter version that served the request, as `name@version`; absent for the base model.",
    "schema": {"type": "string"},
}

EVENTS: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "description": "One event of the stream.",
            "type": "object",
            "properties": {
                "event": {"type": "string", "description": "The kind of event, in streams with several kinds."},
                "data": {"type": "string", "description": "JSON text; `[DONE]` ends a completion's stream."},
            },
            "required": ["data"],
        }
    }
}
"""The `content` of a route that answers with server-sent events; the schema is that of one event."""

LINES: dict[str, Any] = {
    "application/x-ndjson": {
        "schema": {"description": "One line: an object with the same fields, or an error.", "type": "object"}
    }
}
"""The `content` of a route that answers with lines of JSON; the schema is that of one line."""

KINDS = "x-raises"
"""Key that `raises` sets and `document.describe` removes: the class names of the errors with one status."""

GENERATING: tuple[Kind, ...] = (
    AdapterFileError,
    GrammarError,
    ContextLengthError,
    UnknownModelError,
    ConflictError,
    TrainingDisabledError,
    OverloadedError,
    StepFailedError,
    EngineError,
    QueueTimeoutError,
    DeviceMemoryError,
    AbortedError,
    ModelUnavailableError,
    AdapterUnavailableError,
    EngineDeadError,
    DrainingError,
    InferenceDisabledError,
    AsleepError,
    ShortMemoryError,
)


def raises(*kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may raise these errors. `document.describe` adds the errors that follow from
    the route's path, body and query."""
    statuses: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        entry = statuses.setdefault(rule_of(kind).status, {"description": "", KINDS: []})
        entry[KINDS].append(kind.__name__)
    return statuses


def streamable(whole: type[BaseModel], *kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a generating route: one JSON body, or events if `stream` is true, or an error; `kinds` are
    errors in addition to those that all generating routes may raise."""
    described = generating(whole, *kinds)
    described[200] |= {"content": deepcopy(EVENTS), "description": "One body, or server-sent events."}
    return described


def in_lines(whole: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a generating route of Ollama's API, whose streams are lines of JSON."""
    described = generating(whole)
    described[200] |= {"content": deepcopy(LINES), "description": "One body, or lines of JSON."}
    return described


def generating(whole: Any, *kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a generating route that does not stream. `whole`: the answer's model, or a union of models."""
    answer = {"model": whole, "description": "The answers.", "headers": {LORA_ADAPTER: LORA_ADAPTER_HEADER}}
    return {200: answer, **raises(*GENERATING, *kinds)}
