"""No settings from outside, and a small server that answers what a test says."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlx_parallm.config import KEYS


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for key in KEYS.values():
        monkeypatch.delenv(key.env_name, raising=False)
    monkeypatch.delenv("MLX_PARALLM_API_KEY", raising=False)


class Answers(BaseHTTPRequestHandler):
    """Answers from `server.answers` {path: body, (status, body), or a function that makes one of them from what was
    posted}, to who has the key `k`; keeps what was posted."""

    def do_GET(self, posted=None):
        allowed = self.headers["Authorization"] == "Bearer k"
        answer = self.server.answers.get(self.path, (404, b"")) if allowed else (401, b"")
        answer = answer(posted) if callable(answer) else answer
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posted.append((self.path, self.headers["Content-Type"], body))
        self.do_GET(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    """The small server, with its address as `url`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as http:
        http.answers, http.posted, http.url = {}, [], f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield http
        http.shutdown()
        thread.join()
