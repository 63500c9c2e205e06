"""`mlx_parallm_serve` as a process of its own, or in a thread: `from main_job.serving import start, stop`."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from mlx_parallm.app.serve import IntegratedServer
from mlx_parallm.cli.flags import settings
from mlx_parallm.cli.main import serve_parser
from mlx_parallm.config import resolve

START_S = 300
STOP_S = 20
SERVED = "SmolLM2-135M-Instruct"
COMMAND = (sys.executable, "-m", "mlx_parallm", "serve")
PROMPT, TOKENS = "Once upon a time", 5


@dataclass(frozen=True)
class Said:
    """A greedy continuation of `PROMPT`, and the adapter version that it came from; None: the base."""

    text: str
    adapter: str | None


@dataclass(frozen=True)
class Server:
    """`http` keeps its connections and may be used by many threads. `process`: None in this process."""

    url: str
    http: httpx.Client = field(repr=False)
    process: subprocess.Popen[str] | None = None

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ask(self, model: str | None = None, max_tokens: int = TOKENS, **fields: Any) -> Said:
        named = fields if model is None else {"model": model, **fields}
        body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **named}
        answer = self.post("/v1/completions", **body)
        return Said(answer["choices"][0]["text"], answer.get("lora_adapter"))

    def stream(self, model: str, max_tokens: int) -> openai.Stream[openai.types.Completion]:
        return self.client().completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start(*flags: str, port: int | None = None) -> Server:
    """`mlx_parallm_serve` as a user starts it; returns when its banner says that it is ready."""
    port = port or free_port()
    process = subprocess.Popen([*COMMAND, "--port", str(port), *flags], stderr=subprocess.PIPE, text=True)
    killer = threading.Timer(START_S, process.kill)
    killer.start()
    assert process.stderr is not None
    ready = any("base URL" in line for line in process.stderr)
    killer.cancel()
    assert ready, f"the server ended with {process.wait()}"
    threading.Thread(target=process.stderr.read, daemon=True).start()
    url = f"http://127.0.0.1:{port}"
    return Server(url, httpx.Client(base_url=url, timeout=60), process)


@contextmanager
def in_thread(*flags: str) -> Iterator[Server]:
    """The same in a thread of this process, which starts sooner."""
    args = serve_parser().parse_args(flags)
    server, port = IntegratedServer(resolve(settings(args), file=args.config).config), free_port()
    begun: Future[Callable[[], None]] = Future()
    thread = threading.Thread(target=asyncio.run, args=(_serve(server, port, begun),))
    thread.start()
    end, url = begun.result(), f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=60) as http:
            _wait_until_ready(http, thread)
            yield Server(url, http)
    finally:
        end()
        thread.join()


async def _serve(server: IntegratedServer, port: int, begun: Future[Callable[[], None]]) -> None:
    """Serves and trains until what `begun` gets is called, from another thread."""
    serving, loop = (
        asyncio.gather(server.run_inference(port=port), server.run_training_loop()),
        asyncio.get_running_loop(),
    )
    begun.set_result(lambda: loop.call_soon_threadsafe(serving.cancel))
    with suppress(asyncio.CancelledError):
        await serving


def _wait_until_ready(http: httpx.Client, thread: threading.Thread) -> None:
    while thread.is_alive():
        with suppress(httpx.ConnectError):
            if http.get("/health").status_code == 200:
                return
        time.sleep(0.02)
    raise AssertionError("the server could not start")


def stop(server: Server) -> None:
    """SIGTERM, which must end it with 0."""
    assert server.process is not None
    server.http.close()
    server.process.send_signal(signal.SIGTERM)
    try:
        assert server.process.wait(timeout=STOP_S) == 0
    finally:
        server.process.kill()


@contextmanager
def asking(server: Server, model: str) -> Iterator[list[Said]]:
    """Two clients that ask without a pause while the block runs, and once more after it; the list is what they hear."""
    told: list[Said] = []
    over = threading.Event()

    def keep_asking(_: int) -> None:
        while not over.is_set():
            told.append(server.ask(model))
        told.append(server.ask(model))

    with ThreadPoolExecutor(2) as pool:
        heard = pool.map(keep_asking, range(2))
        try:
            yield told
        finally:
            over.set()
        list(heard)


def text_of(chunks: Iterable[openai.types.Completion]) -> str:
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
