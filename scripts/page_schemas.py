#!/usr/bin/env python3
"""Prints the schemas of what the dashboard sends and reads, from the server's OpenAPI document, as one JSON schema.

`scripts/dashboard` makes `dashboard/src/api/schema.ts` of it. The page's sources name what a route answers, such as
`Answers["GET /v1/stats"]`, and the body of a request, such as `Bodies["POST /v1/training/lesson"]`. The description of
the printed schema has its checksum and becomes a comment in `schema.ts`. A test compares the checksum, so it needs no
Node to see whether that file belongs to today's document.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from mlx_parallm.server.app import openapi_document

SOURCES = Path(__file__).resolve().parent.parent / "dashboard" / "src" / "api"
NAMED = re.compile(r'\b(Answers|Bodies)\["([A-Z]+) (/[^"]*)"\]')
REFERENCE = re.compile(r'"#/components/schemas/(\w+)"')


def page_schemas() -> dict[str, Any]:
    """The schema of an object with the parts `Answers` and `Bodies`, each of which has what the sources name, by route.

    Raises:
        KeyError: the document has no such route, or the route no such schema.
    """
    document = openapi_document()
    parts: dict[str, Any] = {"Answers": {}, "Bodies": {}}
    named = {each for source in SOURCES.glob("*.ts") for each in NAMED.findall(source.read_text("utf-8"))}
    for part, method, path in sorted(named):
        operation = document["paths"][path][method.lower()]
        described = operation["responses"]["200"] if part == "Answers" else operation["requestBody"]
        parts[part][f"{method} {path}"] = _plain(described["content"]["application/json"]["schema"])
    page = _object("Page", {part: _object(part, schemas) for part, schemas in parts.items()})
    page["components"] = {"schemas": _reached(page, document["components"]["schemas"])}
    checksum = hashlib.sha256(json.dumps(page, sort_keys=True).encode()).hexdigest()
    return page | {"description": f"Made by scripts/dashboard from /openapi.json; checksum {checksum[:32]}."}


def _object(title: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has a field for each of these."""
    return {"title": title, "type": "object", "properties": schemas, "required": [*schemas]}


def _reached(start: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """The schemas that `start` refers to, and those that they refer to, by name."""
    found: dict[str, Any] = {}
    waiting = [start]
    while waiting:
        for name in REFERENCE.findall(json.dumps(waiting.pop())):
            if name not in found:
                found[name] = _plain(schemas[name]) | {"title": name}
                waiting.append(found[name])
    return found


def _plain(part: Any) -> Any:
    """A part of the document without titles: the generator would make a type of each field that has one."""
    if isinstance(part, dict):
        return {key: _plain(value) for key, value in part.items() if key != "title" or not isinstance(value, str)}
    return [_plain(each) for each in part] if isinstance(part, list) else part


if __name__ == "__main__":
    print(json.dumps(page_schemas()))
