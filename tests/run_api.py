"""A stand-in for `run-api` of atroposlib 0.4.0, and groups as it answers them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NOT_REGISTERED = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
_ABSENT = (
    *("advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs", "overrides"),
    *("group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs"),
)


def scored(**fields: Any) -> dict[str, Any]:
    """A group with all keys, absent ones as null."""
    sent = {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [1.0, 0.0]}
    return {**dict.fromkeys(_ABSENT), **sent, **fields}


class RunApi:
    """Answers on a port until `stop`.

    `batches`: served one a call, the last one first. `registered`: bodies of /register. `asked`: calls of /batch, which
    are answered while `hold` is set.
    """

    def __init__(self, port: int = 0) -> None:
        self.batches: list[Any] = []
        self.registered: list[dict[str, Any]] = []
        self.asked = 0
        self.hold = threading.Event()
        self.hold.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, path: str) -> object:
        if path == "/info":
            return {"batch_size": self.registered[0]["batch_size"], "max_token_len": 64}
        assert path == "/batch"
        self.asked += 1
        if not self.registered:
            return NOT_REGISTERED
        answer = {"batch": self.batches.pop() if self.batches else None}
        self.hold.wait()
        return answer

    def stop(self) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()


def _handler(api: RunApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(api.answer(self.path))

        def do_POST(self) -> None:
            api.registered.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._send({"uuid": 2**127 + 1})

        def _send(self, value: object) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
