"""The process: wire limits of the real server, signals, drain, a dead engine."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.grammar.compiler import LLCompiler
from mlx_parallm.server.address import bind

pytestmark = pytest.mark.ci

PATIENCE_S = 30
SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
from server.fake_control import FakeAdapters, FakeTraining
from server.fakes import CARD, ByteTokenizer, FakeEngine
from mlx_parallm.config import ServerConfig
from mlx_parallm.server.app import create_app
from mlx_parallm.server.backend import Backend
from server.one_model import OneModel
engine = FakeEngine()
engine.pause_before = 2
config = ServerConfig(port=0, shutdown_timeout=1.0)
app = create_app(Backend(engine, FakeAdapters(), OneModel(ByteTokenizer(), CARD), config, FakeTraining()))
# Once draining, the work that was under way goes on to its end.
begin = app.state.services.lifecycle.begin_drain
app.state.services.lifecycle.begin_drain = lambda: (begin(), engine.go_on.set())
from mlx_parallm.server.run import serve
import asyncio
sys.exit(asyncio.run(serve(app, lambda port: print(port, flush=True))))
"""


@pytest.fixture
def process():
    """A server process whose requests stop after two tokens until it drains."""
    command = [sys.executable, "-c", SERVE, str(Path(__file__).parents[1])]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield server
    server.kill()
    server.communicate()


async def test_sigterm_drains(process):
    server, port = process, int(process.stdout.readline())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        async with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as stream:
            lines = aiter(stream.aiter_lines())
            await anext(lines)
            server.send_signal(signal.SIGTERM)
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"
        assert '"finish_reason":"stop"' in rest[-4]
    assert server.wait(PATIENCE_S) == 0
    assert server.stderr.read() == ""


async def test_an_engine_that_dies_later_stops_the_server(serving, engine):
    async with serving() as server:
        engine.state["alive"] = False
        await asyncio.wait_for(asyncio.shield(server.stopped), PATIENCE_S)
        assert server.uvicorn.exit_code == 1


async def test_a_second_signal_does_not_wait(serving, engine):
    engine.pause_before = 0
    async with serving(shutdown_timeout=60) as server, httpx.AsyncClient(base_url=server.url) as client:
        request = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        await engine.paused.wait()
        server.uvicorn.handle_exit(signal.SIGINT, None)
        await asyncio.sleep(0.3)
        assert not request.done()
        server.uvicorn.handle_exit(signal.SIGINT, None)
        assert (await asyncio.wait_for(request, PATIENCE_S)).status_code == 503


def test_a_taken_port_is_a_configuration_error():
    with bind("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="choose another"):
        bind("127.0.0.1", taken.getsockname()[1])


async def test_a_huge_body_is_answered_though_unread(serving):
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        response = await client.post("/v1/completions", json={"prompt": "x" * 40_000_000})
        assert response.status_code == 413
        assert (await client.get("/health")).status_code == 200


async def test_the_connection_of_an_unforeseen_failure_says_that_it_closes(serving, monkeypatch):
    monkeypatch.setattr(LLCompiler, "compile", lambda *_: 1 / 0)
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        failed = await client.post("/v1/completions", json={"prompt": "x", "guided_regex": "a"})
        assert (failed.status_code, failed.headers["connection"]) == (500, "close")
        assert (await client.get("/health")).status_code == 200
