"""The OpenAPI document: FastAPI's, with our own body parsing, every error by its code, and examples that run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from mlx_parallm.errors import (
    AbortedError,
    AdapterUnavailableError,
    ConflictError,
    ContextLengthError,
    DeviceMemoryError,
    EngineDeadError,
    EngineError,
    GrammarError,
    OverloadedError,
    QueueTimeoutError,
    RequestError,
    StepFailedError,
    TrainingDisabledError,
    UnknownModelError,
)
from mlx_parallm.server.body import OPEN
from mlx_parallm.server.errors import (
    RULES,
    ApiKeyError,
    AsleepError,
    BodyTimeoutError,
    BodyTooLargeError,
    DrainingError,
    ForbiddenOriginError,
    InferenceDisabledError,
    MediaTypeError,
    rule_of_kind,
)
from mlx_parallm.server.examples import BODIES
from mlx_parallm.server.exchange import IGNORED_FIELDS, LORA_ADAPTER, REQUEST_ID
from mlx_parallm.server.security import OPEN_PATHS
from mlx_parallm.server.wire.common import ErrorBody

Operation = dict[str, Any]
Kind = type[Exception]

DESCRIPTION = """\
An OpenAI-compatible server on MLX: one base model, many LoRA adapters in one continuous batch, trained while it serves.

Every error has the body `{"error": {"message", "type", "param", "code"}}`; `param` names the field at fault. null means
left out. A field that is declared, with a value that cannot be honoured, is refused. Where a body takes fields that are
not declared, they are ignored, and the header `x-ignored-fields` of the response names them; not in a request with
`collect_trajectory`, and not on a server with `--strict-fields`: there they are refused.

HEAD is taken where GET is, and a path may have a slash at its end. A request may bring its own `X-Request-Id`, of at
most 128 printable ASCII characters; the response has it, or one of the server's.
"""

REQUEST_ID_HEADER: dict[str, Any] = {
    "description": "The client's own, or one of the server's: of a generation, the `id` of its body.",
    "schema": {"type": "string"},
}
IGNORED_FIELDS_HEADER: dict[str, Any] = {
    "description": "Fields of the body that were ignored, separated by commas: at most 20 names of at most 64 "
    "characters, percent-encoded. Left out where there are none.",
    "schema": {"type": "string"},
}
LORA_ADAPTER_HEADER: dict[str, Any] = {
    "description": "`name@version` that served it; left out for the base.",
    "schema": {"type": "string"},
}

EVENTS: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "description": "One event of the stream.",
            "type": "object",
            "properties": {
                "event": {"type": "string", "description": "Its kind, where a stream has several."},
                "data": {"type": "string", "description": "JSON text; `[DONE]` ends a completion's stream."},
            },
            "required": ["data"],
        }
    }
}
"""The `content` of a stream of events: each of them, as a client reads it."""

KINDS = "x-raises"
"""Between `raises` and `describe`: the errors of one status, by the names of their classes."""

ANYWHERE: tuple[Kind, ...] = (ForbiddenOriginError, Exception)
WITH_BODY: tuple[Kind, ...] = (RequestError, BodyTimeoutError, BodyTooLargeError, MediaTypeError, OverloadedError)
GENERATING: tuple[Kind, ...] = (
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
    AdapterUnavailableError,
    EngineDeadError,
    DrainingError,
    InferenceDisabledError,
    AsleepError,
)


def raises(*kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may raise these, beside what any route of its form may."""
    statuses: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        entry = statuses.setdefault(rule_of_kind(kind).status, {"description": "", KINDS: []})
        entry[KINDS].append(kind.__name__)
    return statuses


def streamable(whole: type[BaseModel], *kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a generating route: one JSON body, or events when `stream` is true; or an error, `kinds` among
    them."""
    headers = {LORA_ADAPTER: LORA_ADAPTER_HEADER}
    about = "One body, or server-sent events."
    answer = {"model": whole, "content": deepcopy(EVENTS), "description": about, "headers": headers}
    return {200: answer, **raises(*GENERATING, *kinds)}


def describe(app: FastAPI, strict_fields: bool) -> dict[str, Any]:
    """The document, made once and kept on the app. `strict_fields`: no body takes fields that are not declared."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for path, operation in _operations(document):
            opens = operation.get("requestBody", {}).pop(OPEN, False) and not strict_fields
            if opens:
                _open(_content(operation)["schema"])
            schemas |= _lift_definitions(operation)
            operation["responses"] = _with_headers(_responses(path, operation), opens)
            if path in BODIES and "requestBody" in operation:
                _content(operation)["examples"] = {name: {"value": body} for name, body in BODIES[path].items()}
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        schemas |= _error_schemas()
        app.openapi_schema = document
    return app.openapi_schema


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, Operation]]:
    for path, item in document["paths"].items():
        for operation in item.values():
            yield path, operation


def _responses(path: str, operation: Operation) -> dict[str, Any]:
    """The answers as declared, then every error that can come, by status."""
    declared: dict[str, Any] = operation["responses"]
    named = {name for answer in declared.values() for name in answer.get(KINDS, ())}
    kinds = {kind for kind in _all_kinds() if kind.__name__ in named} | set(_of_form(path, operation))
    answers = {status: answer for status, answer in declared.items() if status != "422" and KINDS not in answer}
    for status in sorted({rule_of_kind(kind).status for kind in kinds}):
        answers[str(status)] = _error(kind for kind in kinds if rule_of_kind(kind).status == status)
    return answers


def _with_headers(answers: Mapping[str, dict[str, Any]], opens: bool) -> dict[str, Any]:
    common = {REQUEST_ID: REQUEST_ID_HEADER} | ({IGNORED_FIELDS: IGNORED_FIELDS_HEADER} if opens else {})
    return {
        status: {**answer, "headers": {**answer.get("headers", {}), **common}} for status, answer in answers.items()
    }


def _open(schema: dict[str, Any]) -> None:
    """Lets every object of a body, and of its definitions, have other properties than those declared."""
    for part in (schema, *schema.get("$defs", {}).values()):
        if "properties" in part:
            part["additionalProperties"] = True


def _all_kinds() -> Iterable[Kind]:
    return (*RULES, *GENERATING)


def _of_form(path: str, operation: Operation) -> Iterator[Kind]:
    """Errors that a route can give because of how it is asked."""
    yield from ANYWHERE
    if path not in OPEN_PATHS:
        yield ApiKeyError
    if "requestBody" in operation:
        yield from WITH_BODY
    if any(parameter["in"] == "query" for parameter in operation.get("parameters", ())):
        yield RequestError


def _error(kinds: Iterable[Kind]) -> dict[str, Any]:
    """One status: its codes, and what each means."""
    rules = {rule_of_kind(kind): kind for kind in sorted(kinds, key=lambda kind: kind.__name__)}
    about = {str(rule.code or rule.type): rule.message or _meaning(kind) for rule, kind in rules.items()}
    lines = [f"`{code}`: {meaning}" for code, meaning in sorted(about.items())]
    schema = {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}
    return {"description": "\n\n".join(lines), "content": {"application/json": {"schema": schema}}}


def _meaning(kind: Kind) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def _error_schemas() -> dict[str, Any]:
    schema = ErrorBody.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**schema.pop("$defs"), ErrorBody.__name__: schema}


def _content(operation: Operation) -> dict[str, Any]:
    content: Mapping[str, dict[str, Any]] = operation["requestBody"]["content"]
    return content["application/json"]


def _lift_definitions(operation: Operation) -> dict[str, Any]:
    """Takes the `$defs` out of a request body's schema: its references point at the document's components."""
    if "requestBody" not in operation:
        return {}
    definitions: dict[str, Any] = _content(operation)["schema"].pop("$defs", {})
    return definitions
