"""The OpenAPI document: FastAPI's, completed with roles, request bodies, examples and the errors of each API."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from fastapi import FastAPI
from fastapi.encoders import jsonable_encoder
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from mlx_parallm.server.api.fields import OpenBody
from mlx_parallm.server.body import BodyModel
from mlx_parallm.server.errors import FORMS, OPENAI, RULES, form_of
from mlx_parallm.server.request_log import LORA_ADAPTER
from mlx_parallm.server.routing import Endpoint

DESCRIPTION = """\
An OpenAI-compatible server on MLX: one base model, many LoRA adapters in one continuous batch, and a trainer.

Every error has the body `{"error": {"message", "type", "param", "code"}}`; `param` names the field at fault. Errors of
`/v1/messages` have Anthropic's form, and those of `/api/chat` and its like Ollama's. `components.responses` lists every
code. A field that is null counts as left out. A declared field with an unsupported value is refused. Where a schema
allows undeclared fields, they are ignored, and the response header `x-ignored-fields` names them: at most 20 names of
at most 64 characters, separated by commas and percent-encoded. They are refused in a request with
`collect_trajectory`, and by a server with `--strict-fields`.

`x-role` of an operation is the least role of the key that it needs; an operation without one needs no key.

Every GET route accepts HEAD, and every path may end with a slash. A request may have its own `X-Request-Id`, of at most
128 printable ASCII characters; the response repeats it, or has one that the server made: for a generation, the answer's
`id`.
"""

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

SCHEMA, RESPONSE = "#/components/schemas/{model}", "#/components/responses/{model}"


def generating(whole: Any) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a generating route that does not stream. `whole`: the answer's model, or a union of models."""
    return {200: {"model": whole, "description": "The answers.", "headers": {LORA_ADAPTER: LORA_ADAPTER_HEADER}}}


def streamable(whole: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a generating route: one JSON body, or events if `stream` is true."""
    return _either(whole, EVENTS, "One body, or server-sent events.")


def in_lines(whole: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a generating route of Ollama's API, whose streams are lines of JSON."""
    return _either(whole, LINES, "One body, or lines of JSON.")


def _either(whole: type[BaseModel], stream: dict[str, Any], description: str) -> dict[int | str, dict[str, Any]]:
    described = generating(whole)
    described[200] |= {"content": deepcopy(stream), "description": description}
    return described


def describe(app: FastAPI, routes: Iterable[Endpoint], strict_fields: bool) -> dict[str, Any]:
    """The OpenAPI document, made once and kept on the app.

    Args:
        routes: all routes of the app.
        strict_fields: whether undeclared fields are refused in every body.
    """
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
        schemas = document["components"]["schemas"]
        for route in routes:
            for method in (route.methods or ()) if route.include_in_schema else ():
                parts = _complete(document["paths"][route.path_format][method.lower()], route, strict_fields)
                # A part of several bodies allows undeclared fields if one of them does, whatever their order.
                is_open = {name for name in parts if schemas.get(name, {}).get("additionalProperties") is True}
                schemas |= {name: schema for name, schema in parts.items() if name not in is_open}
        for unused in ("HTTPValidationError", "ValidationError", "AdapterRef"):
            schemas.pop(unused, None)
        document["components"]["responses"] = errors = {}
        for form in (OPENAI, *FORMS.values()):
            name, schema = form.model.__name__, form.model.model_json_schema(ref_template=SCHEMA)
            schemas |= {**schema.pop("$defs", {}), name: schema}
            content = {"application/json": {"schema": {"$ref": SCHEMA.format(model=name)}}}
            errors[name] = {"description": _errors(), "content": content}
        for schema in schemas.values():
            for field in schema.get("properties", {}).values():
                if "const" in field:
                    field.setdefault("description", "Always this value.")
        app.openapi_schema = document
    return app.openapi_schema


def _complete(operation: dict[str, Any], route: Endpoint, strict_fields: bool) -> dict[str, Any]:
    """Adds to an operation what FastAPI does not know. Returns the schemas that its body refers to."""
    operation["responses"].pop("422", None)
    operation["responses"]["default"] = {"$ref": RESPONSE.format(model=form_of(route.path).model.__name__)}
    if route.access.role is not None:
        operation["x-role"] = route.access.role
    bodies = (getattr(each.call, "body", None) for each in route.dependant.dependencies)
    body = next((body for body in bodies if body is not None), None)
    if body is None:
        assert not route.examples, f"{route.path} has example bodies, and no body"
        return {}
    operation["requestBody"], definitions = _request_body(body, route, strict_fields)
    return definitions


def _request_body(body: BodyModel, route: Endpoint, strict_fields: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `requestBody` of an operation, and the schemas that it refers to."""
    schema = jsonable_encoder(body.model.model_json_schema(ref_template=SCHEMA), exclude_none=True)
    definitions: dict[str, Any] = schema.pop("$defs", {})
    if issubclass(body.model, OpenBody) and not strict_fields:
        for part in (schema, *definitions.values()):
            if "properties" in part:
                part["additionalProperties"] = True
    examples = {name: {"value": example} for name, example in route.examples.items()}
    return {
        "required": body.required,
        "content": {"application/json": {"schema": schema, "examples": examples}},
    }, definitions


def _errors() -> str:
    """Every code, with its status and meaning."""
    meanings = ((rule, rule.message or (kind.__doc__ or "").partition("\n")[0]) for kind, rule in RULES.items())
    lines = (f"{rule.status} `{rule.code or 'invalid_request_error'}`: {meaning}" for rule, meaning in meanings)
    return "\n\n".join(sorted(lines))
