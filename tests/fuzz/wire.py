"""Requests to the app in this process, and what every answer must be: no fault of the server, and an error in its form.

An input is `METHOD /path`, and the body on the lines after it.
"""

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, cached_property
from random import Random
from typing import Any

from fuzz.mutation import Mutate, after_first_line, json_with
from server.fake_control import (
    FakeAdapters,
    FakeAverages,
    FakeCompetition,
    FakeForgetting,
    FakeLessons,
    FakeRewardModels,
    FakeTraining,
    FakeWhy,
)
from server.fakes import CARD, FakeEngine, ThinkingTokenizer
from server.one_model import OneModel

from mlx_parallm.config import ServerConfig
from mlx_parallm.extras.atropos.route import AtroposParts
from mlx_parallm.extras.atropos.trajectory_api import Registration
from mlx_parallm.grammar import compiler, trial
from mlx_parallm.server.app import create_app, openapi_document
from mlx_parallm.server.backend import Backend

logging.getLogger("mlx_parallm").setLevel(logging.CRITICAL)
PATIENCE_S = 60
LARGE_CARD = replace(CARD, context_length=10_000)
TRAINER = Registration(32, LARGE_CARD.context_length, "/runs/one", 10, 0, 10**9, "run-1", "mlx-parallm")
_TRIAL = trial.Trial(0.5)  # of all apps; a child takes seconds to start
compiler.Trial = lambda cpu_limit_s: _TRIAL  # type: ignore[assignment, misc]


class Wire:
    """An app over fakes, whose state is new for each input. `begin`: how the paths begin that are asked for."""

    def __init__(self, *begin: str, **training: Any) -> None:
        self.begin = begin
        self.runner = asyncio.Runner()
        self.engine, self.adapters = FakeEngine(), FakeAdapters()
        self.training = FakeTraining(
            averages=FakeAverages(), reward_models=FakeRewardModels(), lessons=FakeLessons(), why=FakeWhy(),
            competition=FakeCompetition(), forgetting=FakeForgetting(), **training,
        )  # fmt: skip
        self.training.extras["people"] = self.training
        parts = AtroposParts.of(TRAINER, self.training, self.training, LARGE_CARD)
        self.training.extras["atropos"] = parts
        model = OneModel(ThinkingTokenizer(), LARGE_CARD)
        self.app = create_app(Backend(self.engine, self.adapters, model, ServerConfig(), self.training))

    def reset(self) -> None:
        """Forgets what earlier inputs have done to the fakes."""
        self.engine.__init__()  # type: ignore[misc]
        self.engine.text = 'Hi ä!<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
        self.adapters.__init__()  # type: ignore[misc]
        self.adapters.publish("math")
        extras = self.training.extras
        self.training.__init__(**extras)  # type: ignore[misc]

    def ask(self, method: str, path: str, body: bytes, kind: str = "application/json") -> tuple[int, bytes]:
        """The status and the body of an answer, which has been checked."""
        return self.runner.run(asyncio.wait_for(self._ask(method, path, body, kind), PATIENCE_S))

    def check_idle(self) -> None:
        """Nothing is left of the requests."""
        assert not self.engine.live
        assert not self.adapters.leased

    async def _ask(self, method: str, path: str, body: bytes, kind: str) -> tuple[int, bytes]:
        path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "headers": [(b"host", b"localhost:8000"), (b"content-type", kind.encode())],
            "client": ("127.0.0.1", 5000), "server": ("localhost", 8000), "state": {},
        }  # fmt: skip
        sent, never = [], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not sent:
                sent.append(True)
                return {"type": "http.request", "body": body, "more_body": False}
            await never.wait()
            raise AssertionError

        messages: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)

        await self.app(scope, receive, send)
        answer = b"".join(message.get("body", b"") for message in messages[1:])
        self._check(messages[0], answer)
        return messages[0]["status"], answer

    def _check(self, start: dict[str, Any], answer: bytes) -> None:
        status, headers = start["status"], dict(start["headers"])
        assert status < 500 or status == 501, (status, answer)
        assert b"internal_error" not in answer, answer
        text = answer.decode()
        if text and headers.get(b"content-type", b"").startswith(b"application/json"):
            value = json.loads(text, parse_constant=lambda constant: _refuse(constant))
            assert status < 400 or value.get("error") or value.get("detail"), text
        elif b"event-stream" in headers.get(b"content-type", b""):
            for line in text.splitlines():
                if line.startswith("data: {"):
                    json.loads(line.removeprefix("data: "))

    def mutated(self, data: bytes, rng: Random) -> bytes:
        """Another request: with a field that the API's document has, or on another route of `begin`."""
        return self._mutate(data, rng)

    @cached_property
    def _mutate(self) -> Mutate:
        document = _document()
        schemas = list(_schemas(document))
        names = {name for schema in schemas for name in schema.get("properties", {})}
        lists = [schema["enum"] for schema in schemas if isinstance(schema.get("enum"), list)]
        constants = [[schema["const"]] for schema in schemas if "const" in schema]
        words = {word for found in (*lists, *constants) for word in found if isinstance(word, str) and word}
        values = [*sorted(words), {"role": "user", "content": "x"}, ["x"], "math"]
        routes = [(path, methods) for path, methods in document["paths"].items() if path.startswith(self.begin)]
        lines = [f"{method.upper()} {path}" for path, methods in routes for method in methods]
        return after_first_line(json_with(sorted(names), values), lines)


@cache
def _document() -> dict[str, Any]:
    return openapi_document()


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _schemas(inner)


def asked(data: bytes) -> tuple[str, str, bytes]:
    """The method, the path and the body of an input."""
    line, _, body = data.partition(b"\n")
    method, _, path = line.decode("ascii", "replace").partition(" ")
    return method, path if path.startswith("/") else "/" + path, body
