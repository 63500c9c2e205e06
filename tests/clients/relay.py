"""A relay between a client and a server: it records the requests and what was answered, and may change a request.

So a test can enforce what the client's own settings cannot ask for, and read each event that the client reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx

Body = dict[str, Any]
LIMIT_S = 900


@dataclass
class Exchange:
    """One request as the client sent it, its length in bytes, and the answer that the client got."""

    body: Body
    size: int
    status: int = 0
    ignored: str | None = None
    answer: str = ""


@dataclass
class Relay:
    """`url` is that of the relay; `exchanges` are all POST requests, in order."""

    url: str
    exchanges: list[Exchange] = field(default_factory=list)


@contextmanager
def relaying(server: str, change: Callable[[Body], Body] = lambda body: body) -> Iterator[Relay]:
    """Relays to the server at this URL while the block runs. `change` makes the body that the server gets."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            exchange = Exchange(json.loads(raw), len(raw))
            relay.exchanges.append(exchange)
            sent = {"json": change(exchange.body), "timeout": LIMIT_S}
            with httpx.stream("POST", server + self.path, **sent) as answer:
                exchange.status, exchange.ignored = answer.status_code, answer.headers.get("x-ignored-fields")
                self.send_response(answer.status_code)
                self.send_header("content-type", answer.headers["content-type"])
                self.end_headers()
                for text in answer.iter_text():
                    exchange.answer += text
                    self.wfile.write(text.encode())

        def do_GET(self) -> None:
            answer = httpx.get(server + self.path)
            self.send_response(answer.status_code)
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format: str, *args: Any) -> None:
            """The test tells what happened."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        relay = Relay(f"http://127.0.0.1:{listener.server_port}")
        Thread(target=listener.serve_forever, daemon=True).start()
        try:
            yield relay
        finally:
            listener.shutdown()
