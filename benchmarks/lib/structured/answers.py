"""Asks a real server for answers that follow JSON schemas, and validates them."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from benchmarks.lib import peers
from benchmarks.lib.load import HOST

AT_ONCE, TOKENS, LIMIT_S = 16, 256, 600.0
TEMPERATURE = 0.7
ASK = "Answer with a short example of JSON that is valid for this JSON schema, and with nothing else:\n{schema}"
SHOWN = 1500
"""Characters of a schema that the prompt shows, because the model's context is short."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to one schema. `finished`: whether it ended within the token limit. `error`: the request's error, if
    any."""

    name: str
    finished: bool
    valid: bool
    tokens: int
    text: str
    error: str = ""


async def measure(logs: Path, schemas: Sequence[dict[str, Any]]) -> list[Answered]:
    """The answers in the order of `schemas`, of which each has `name` and `schema`."""
    async with peers.our_server(None, logs) as server:
        with server.awake():
            async with httpx.AsyncClient(base_url=f"http://{HOST}:{server.port}", timeout=LIMIT_S) as http:
                places = asyncio.Semaphore(AT_ONCE)
                return await asyncio.gather(*(_answer(http, places, seed, each) for seed, each in enumerate(schemas)))


async def _answer(http: httpx.AsyncClient, places: asyncio.Semaphore, seed: int, each: dict[str, Any]) -> Answered:
    name, schema = each["name"], each["schema"]
    body = {
        "messages": [{"role": "user", "content": ASK.format(schema=json.dumps(schema)[:SHOWN])}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
        "max_tokens": TOKENS,
        "temperature": TEMPERATURE,
        "seed": seed,
    }
    async with places:
        response = await http.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        return Answered(name, False, False, 0, "", response.text)
    answer = response.json()
    choice = answer["choices"][0]
    text, finished = choice["message"]["content"], choice["finish_reason"] == "stop"
    valid = finished and _valid(text, schema)
    print(f"  {'valid' if valid else 'cut short' if not finished else 'INVALID':<9} {name}", flush=True)
    return Answered(name, finished, valid, answer["usage"]["completion_tokens"], text)


def _valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
