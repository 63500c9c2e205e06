"""Starts Open WebUI as its users do, and asks it as its own page does."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from clients.running import UV, asking_no_other_host, printed
from main_job.serving import SERVED, free_port

PACKAGE = "open-webui==0.12.4"
ITS_PYTHON = ">=3.11,<3.13"
START_S, ANSWER_S = 300, 600
OFFLINE = {
    "OFFLINE_MODE": "true",  # no search for updates of itself, of models or of Python packages
    "HF_HUB_OFFLINE": "1",
    "RAG_EMBEDDING_MODEL": SERVED,  # with the engine below, in place of a model from a hub
    "RAG_EMBEDDING_ENGINE": "openai",
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "true",
}
"""Its variables that keep it from asking a hub and other hosts."""
MODELS = {"openai": f"openai.{SERVED}", "ollama": SERVED}
"""Its names of the served model, by the kind of the connection."""


@dataclass(frozen=True)
class WebUI:
    """`http` is logged in as its administrator."""

    http: httpx.Client

    def get(self, path: str, **query: Any) -> Any:
        return self._json(self.http.get(path, params=query))

    def post(self, path: str, **body: Any) -> Any:
        return self._json(self.http.post(path, json=body))

    def lines(self, path: str, **body: Any) -> list[str]:
        """The lines of a streamed answer that are not empty."""
        with self.http.stream("POST", path, json={"stream": True, **body}) as answer:
            text = answer.read().decode()
            assert answer.status_code == 200, text
        return [line for line in text.splitlines() if line]

    def add_file(self, name: str, text: str) -> str:
        """The id of a file that it has read, cut into pieces and made vectors of."""
        added = self._json(self.http.post("/api/v1/files/", files={"file": (name, text.encode(), "text/plain")}))
        file_id: str = added["id"]
        path = f"/api/v1/files/{file_id}/process/status"
        state = self.wait_for(path, lambda found: found["status"] in ("completed", "failed"))
        assert state["status"] == "completed", state
        return file_id

    def wait_for(self, path: str, is_ready: Any) -> Any:
        """What a path answers as soon as that is ready."""
        until = time.monotonic() + ANSWER_S
        while not is_ready(found := self.get(path)):
            assert time.monotonic() < until, found
            time.sleep(0.5)
        return found

    @staticmethod
    def _json(answer: httpx.Response) -> Any:
        assert answer.status_code == 200, answer.text
        return answer.json()


def connections(url: str, key: str) -> dict[str, str]:
    """Its variables for one connection of each kind to a server. A prefix keeps apart the names of their models; it is
    that of the OpenAI kind, because `/ollama/api/show` does not know it."""
    return {
        "OPENAI_API_BASE_URLS": f"{url}/v1",
        "OPENAI_API_KEYS": key,
        "OPENAI_API_CONFIGS": json.dumps({"0": {"prefix_id": "openai"}}),
        "RAG_OPENAI_API_BASE_URL": f"{url}/v1",
        "RAG_OPENAI_API_KEY": key,
        "OLLAMA_BASE_URLS": url,
        "OLLAMA_API_CONFIGS": json.dumps({"0": {"key": key}}),
    }


def program() -> str:
    """Installs it in an environment of its own, and returns the path of its command."""
    own = ("--python", ITS_PYTHON, "--from", PACKAGE)
    python = printed(*UV, "tool", "run", *own, "python", "-c", "import sys; print(sys.executable)")
    return str(Path(python.strip()).parent / "open-webui")


@contextmanager
def webui(url: str, key: str, folder: Path) -> Iterator[WebUI]:
    """Open WebUI with connections to the server at `url`. It keeps what it stores in `folder`. It may connect to no
    host but this one."""
    port = free_port()
    own = {"DATA_DIR": str(folder), "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "none"}
    own["TASK_MODEL_PARAMS"] = json.dumps({"temperature": 0, "max_tokens": 24})  # titles and tags: it would allow 1000
    with asking_no_other_host() as proxied, (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program(), "serve", "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            env=os.environ | proxied | OFFLINE | connections(url, key) | own,
            stdout=log,
            stderr=log,
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S) as http:
                wait_until_ready(process, http, folder / "log")
                yield WebUI(http)
        finally:
            process.terminate()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], http: httpx.Client, log: Path) -> None:
    """Returns when it accepts requests and `http` is logged in."""
    until = time.monotonic() + START_S
    while not is_ready(http):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.5)
    account = http.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
    http.headers["authorization"] = f"Bearer {account['token']}"


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.ConnectError:
        return False
