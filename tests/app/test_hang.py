"""A device that hangs, in a server as users start it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from main_job.serving import free_port
from tiny import save_tiny

pytestmark = [pytest.mark.ci, pytest.mark.timeout(200)]

LIMIT_S = 4
"""A hang counts as one after so many seconds, which no piece of work on a tiny model takes."""
PROGRAM = Path(__file__).parents[1] / "hanging_server.py"


class Running:
    """A server over a tiny model whose device hangs when it is told so."""

    def __init__(self, folder: Path, *flags: str) -> None:
        save_tiny("llama", folder / "model")
        self.order, port = folder / "order", free_port()
        kept = ("--model-path", str(folder / "model"), "--checkpoint-dir", str(folder / "run"))
        sizes = ("--kv-cache-memory", "16MB", "--lora-rank", "4", "--update-frequency", "4")
        end = ("--device-timeout", str(LIMIT_S), "--port", str(port), *flags)
        command = (sys.executable, "-P", str(PROGRAM), str(self.order), "--enable-rl-training", *kept, *sizes, *end)
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self.lines: list[str] = []
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr

    def answers(self, path: str) -> bool:
        with suppress(httpx.TransportError):
            return self.http.get(path).status_code == 200
        time.sleep(0.1)
        return False

    def post(self, path: str, **body: object) -> dict:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[Running]:
    """A server that takes requests; killed at the end of the block."""
    server = Running(folder, *flags)
    try:
        while not server.answers("/ready"):
            assert server.process.poll() is None, server.lines
        yield server
    finally:
        server.process.kill()
        server.thread.join()
        server.http.close()


def test_a_device_that_hangs_is_named_and_ends_the_server(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.order.write_text("_forward")
        body = {"prompt": "abc", "max_tokens": 4, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            while (health := server.http.get("/health")).status_code == 200:
                pass
            refused = server.http.post("/v1/completions", json={"prompt": "abc"})
            *_, error, _, done, _ = stream.iter_lines()
        assert done == "data: [DONE]"
        for text in (health.text, refused.text, error):
            assert "a prefill has taken" in text
        assert (health.status_code, refused.status_code) == (503, 503)
        assert server.process.wait(60) == 1
        server.thread.join()
        assert "in hang_or_run" in "".join(server.lines), "the log shows where it hangs"
