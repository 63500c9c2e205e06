"""A server that answers the requests of a transcript, and nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TRANSCRIPTS = Path(__file__).parent / "transcripts"


class TranscriptServer:
    """`answers`: (route, status, answer) in the order in which the requests must come. `asked`: (route, body).
    `keys`: the header `Authorization` of each request. NAME in an answer becomes the name of the adapter that was
    named last."""

    def __init__(self, answers: list[tuple[str, int, Any]]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, Any]] = []
        self.keys: list[str | None] = []
        self._adapter = "NAME"
        self.url = ""

    def answer(self, route: str, body: Any) -> tuple[int, Any]:
        self.asked.append((route, body))
        if isinstance(body, dict):
            self._adapter = body.get("lora_name", self._adapter)
        if not self.answers or self.answers[0][0] != route:
            return 500, f"{route} is not the next request of the transcript"
        _, status, answer = self.answers.pop(0)
        return status, answer.replace("NAME", self._adapter) if isinstance(answer, str) else answer


@contextmanager
def serving(answers: list[tuple[str, int, Any]]) -> Iterator[TranscriptServer]:
    """A TranscriptServer that listens while the block runs."""
    server = TranscriptServer(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(f"GET {self.path}", None)

        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            self._reply(f"POST {self.path}", json.loads(self.rfile.read(length)))

        def _reply(self, route: str, body: Any) -> None:
            server.keys.append(self.headers["authorization"])
            status, answer = server.answer(route, body)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def transcript(name: str) -> dict[str, Any]:
    """What scripts/engine_transcripts wrote. `scenes`: requests and answers in order, by name. `schemas`: JSON schemas
    of request bodies, by path."""
    made: dict[str, Any] = json.loads((TRANSCRIPTS / f"{name}.json").read_text())
    return made


def scene(name: str, which: str = "draw") -> list[dict[str, Any]]:
    """The requests of a scene, each with the status and the text of its answer."""
    exchanges: list[dict[str, Any]] = transcript(name)["scenes"][which]
    return exchanges


def answers_of(exchanges: list[dict[str, Any]]) -> list[tuple[str, int, Any]]:
    return [(exchange["route"], exchange["status"], exchange["answer"]) for exchange in exchanges]
