"""The OpenAPI document: FastAPI's, with our own body parsing and error bodies described as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from mlx_parallm.server.wire.common import ErrorBody

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request must change."},
    "5XX": {"model": ErrorBody, "description": "The server failed it."},
}


def streamable(whole: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that answers with one JSON body, or with events when `stream` is true."""
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"model": whole, "content": events, "description": "One body, or server-sent events."}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The document, made once and kept on the app."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for operation in _operations(document):
            operation["responses"].pop("422", None)  # FastAPI's own validation error, which we never send
            schemas |= _lift_definitions(operation)
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        app.openapi_schema = document
    return app.openapi_schema


def _operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in document["paths"].values():
        yield from path.values()


def _lift_definitions(operation: dict[str, Any]) -> dict[str, Any]:
    """Takes the `$defs` out of a request body's schema: its references point at the document's components."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return content.get("schema", {}).pop("$defs", {}) if content else {}
