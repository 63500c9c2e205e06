"""The OpenAPI document: FastAPI's, completed with request bodies, every error by its code, and tested examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.encoders import jsonable_encoder
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.routing import Route

from mlx_parallm.errors import OverloadedError, RequestError
from mlx_parallm.server.access.roles import OPEN_PATHS
from mlx_parallm.server.api.fields import OpenBody
from mlx_parallm.server.error_forms import FORMS, OPENAI, form_of
from mlx_parallm.server.errors import (
    RULES,
    ApiKeyError,
    BodyTimeoutError,
    BodyTooLargeError,
    ForbiddenOriginError,
    MalformedPathError,
    MediaTypeError,
    RoleError,
    rule_of,
)
from mlx_parallm.server.http.body import BodyModel
from mlx_parallm.server.http.request_log import IGNORED_FIELDS, REQUEST_ID
from mlx_parallm.server.openapi.examples import EXAMPLES
from mlx_parallm.server.openapi.responses import GENERATING, KINDS, Kind

Operation = dict[str, Any]

DESCRIPTION = """\
An OpenAI-compatible server on MLX: one base model, many LoRA adapters in one continuous batch, and a trainer.

Every error has the body `{"error": {"message", "type", "param", "code"}}`; `param` names the field at fault. Errors of
`/v1/messages` have Anthropic's form, and those of `/api/chat` and its like Ollama's. A field that is null counts as
left out. A declared field with an unsupported value is refused. Where a schema allows undeclared fields, they are
ignored, and the response header `x-ignored-fields` names them; they are refused in a request with `collect_trajectory`,
and by a server with `--strict-fields`.

Every GET route accepts HEAD, and every path may end with a slash. A request may have its own `X-Request-Id`, of at most
128 printable ASCII characters; the response repeats it, or has one that the server made.
"""

REQUEST_ID_HEADER: dict[str, Any] = {
    "description": "The request's `X-Request-Id`, or one that the server made: for a generation, the answer's `id`.",
    "schema": {"type": "string"},
}
IGNORED_FIELDS_HEADER: dict[str, Any] = {
    "description": "Names of the body's fields that were ignored, separated by commas: at most 20 names of at most 64 "
    "characters, percent-encoded. Absent if there are none.",
    "schema": {"type": "string"},
}

REF = "#/components/schemas/{model}"
ANY_ROUTE: tuple[Kind, ...] = (ForbiddenOriginError, Exception)
WITH_BODY: tuple[Kind, ...] = (RequestError, BodyTimeoutError, BodyTooLargeError, MediaTypeError, OverloadedError)


def describe(app: FastAPI, routes: Sequence[Route], strict_fields: bool) -> dict[str, Any]:
    """The OpenAPI document, made once and kept on the app.

    Args:
        routes: all routes of the app.
        strict_fields: whether undeclared fields are refused in every body.
    """
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        bodies = dict(_bodies(routes))
        for path, item in document["paths"].items():
            for method, operation in item.items():
                body = bodies.get((path, method))
                opens = body is not None and issubclass(body.model, OpenBody) and not strict_fields
                if body is not None:
                    operation["requestBody"], definitions = _request_body(path, body, opens)
                    schemas |= definitions
                operation["responses"] = _with_headers(_responses(path, operation), opens)
        for unused in ("HTTPValidationError", "ValidationError", "AdapterRef"):
            schemas.pop(unused, None)
        for form in (OPENAI, *FORMS.values()):
            error = form.model.model_json_schema(ref_template=REF)
            schemas |= {**error.pop("$defs", {}), form.model.__name__: error}
        for schema in schemas.values():
            for field in schema.get("properties", {}).values():
                if "const" in field:
                    field.setdefault("description", "Always this value.")
        app.openapi_schema = document
    return app.openapi_schema


def _bodies(routes: Iterable[Route]) -> Iterator[tuple[tuple[str, str], BodyModel]]:
    """The body of each route that has one, by path and method."""
    for route in routes:
        for needed in route.dependant.dependencies if isinstance(route, APIRoute) else ():
            if (body := getattr(needed.call, "body", None)) is not None:
                yield from (((route.path_format, method.lower()), body) for method in route.methods or ())


def _request_body(path: str, body: BodyModel, opens: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `requestBody` of an operation, and the schemas that it refers to. With `opens`, every object of the body may
    have undeclared fields."""
    schema = jsonable_encoder(body.model.model_json_schema(ref_template=REF), exclude_none=True)
    definitions: dict[str, Any] = schema.pop("$defs", {})
    for part in (schema, *definitions.values()):
        if opens and "properties" in part:
            part["additionalProperties"] = True
    examples = {name: {"value": example} for name, example in EXAMPLES.get(path, {}).items()}
    content = {"application/json": {"schema": schema, "examples": examples}}
    return {"required": body.required, "content": content}, definitions


def _responses(path: str, operation: Operation) -> dict[str, Any]:
    """The declared responses, then every possible error, by status."""
    declared: dict[str, Any] = operation["responses"]
    named = {name for answer in declared.values() for name in answer.get(KINDS, ())}
    kinds = {kind for kind in (*RULES, *GENERATING) if kind.__name__ in named} | set(_of_form(path, operation))
    answers = {status: answer for status, answer in declared.items() if status != "422" and KINDS not in answer}
    for status in sorted({rule_of(kind).status for kind in kinds}):
        answers[str(status)] = _error(path, (kind for kind in kinds if rule_of(kind).status == status))
    return answers


def _with_headers(answers: Mapping[str, dict[str, Any]], opens: bool) -> dict[str, Any]:
    common = {REQUEST_ID: REQUEST_ID_HEADER} | ({IGNORED_FIELDS: IGNORED_FIELDS_HEADER} if opens else {})
    return {
        status: {**answer, "headers": {**answer.get("headers", {}), **common}} for status, answer in answers.items()
    }


def _of_form(path: str, operation: Operation) -> Iterator[Kind]:
    """Errors that follow from a route's path, body and query."""
    yield from ANY_ROUTE
    if path not in OPEN_PATHS:
        yield from (ApiKeyError, RoleError)
    if "requestBody" in operation:
        yield from WITH_BODY
    parameters = operation.get("parameters", ())
    if any(parameter["in"] == "path" for parameter in parameters):
        yield MalformedPathError
    if any(parameter["in"] == "query" or "maxLength" in parameter["schema"] for parameter in parameters):
        yield RequestError


def _error(path: str, kinds: Iterable[Kind]) -> dict[str, Any]:
    """The response of one status of a route, with the meaning of each of its codes."""
    rules = {rule_of(kind): kind for kind in sorted(kinds, key=lambda kind: kind.__name__)}
    meanings = ((rule, rule.message or (kind.__doc__ or "").partition("\n")[0]) for rule, kind in rules.items())
    lines = sorted(f"`{rule.code or 'invalid_request_error'}`: {meaning}" for rule, meaning in meanings)
    schema = {"$ref": REF.format(model=form_of(path).model.__name__)}
    return {"description": "\n\n".join(lines), "content": {"application/json": {"schema": schema}}}
