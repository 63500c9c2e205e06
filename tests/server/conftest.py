"""The app over fakes, in this process or on a port."""

import asyncio
import contextlib
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from server.asking import client_of
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
from server.fakes import CARD, ByteTokenizer, FakeEngine, ThinkingTokenizer
from server.one_model import OneModel

from mlx_parallm.config import ServerConfig
from mlx_parallm.extras.atropos.route import AtroposParts
from mlx_parallm.grammar.trial import Trial
from mlx_parallm.server.address import bind
from mlx_parallm.server.app import create_app
from mlx_parallm.server.backend import Backend
from mlx_parallm.server.run import DrainingServer

CPU_LIMIT_S = 0.5


class SharedTrial(Trial):
    """Outlives the apps that close it."""

    def close(self):
        pass


@pytest.fixture(scope="session")
def shared_trial():
    trial = SharedTrial(CPU_LIMIT_S)
    yield trial
    Trial.close(trial)


@pytest.fixture(autouse=True)
def one_trial_for_all_apps(monkeypatch, shared_trial):
    """A child process that checks grammars takes longer to start than a test of one takes."""
    monkeypatch.setattr("mlx_parallm.grammar.compiler.Trial", lambda cpu_limit_s: shared_trial)


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def adapters():
    return FakeAdapters()


@pytest.fixture
def training():
    return FakeTraining()


@pytest.fixture
def averages(training):
    return training and FakeAverages()


@pytest.fixture
def forgetting(training):
    return training and FakeForgetting()


@pytest.fixture
def reward_models(training):
    return training and FakeRewardModels()


@pytest.fixture
def competition(training):
    return training and FakeCompetition()


@pytest.fixture
def lessons(training):
    return training and FakeLessons()


@pytest.fixture
def make_client(engine, adapters, training, averages, forgetting, reward_models, lessons, competition):
    """`make_client(**settings)` → an httpx client on an in-process app; `client.app` is the app."""

    def make(card=CARD, tokenizer=None, atropos=None, **settings):
        model, config = OneModel(tokenizer or ByteTokenizer(), card), ServerConfig(**settings)
        if training is not None:
            training.extras = {"averages": averages, "reward_models": reward_models, "lessons": lessons}
            training.extras |= {
                "competition": competition,
                "people": training,
                "why": FakeWhy(),
                "forgetting": forgetting,
            }
            if atropos is not None:
                training.extras["atropos"] = AtroposParts.of(atropos, training, training, card)
        return client_of(create_app(Backend(engine, adapters, model, config, training)))

    return make


@pytest.fixture
def client(make_client):
    return make_client()


@pytest.fixture
def post_json(make_client):
    """`post_json(path, content, headers)` → the response, without an event loop around it. All requests go to one app,
    because making one takes much longer than a request."""
    with asyncio.Runner() as runner:
        client = make_client()

        def send(path, content, headers=None):
            given = {"content-type": "application/json"} if headers is None else headers
            return runner.run(client.post(path, content=content, headers=given))

        yield send
        runner.run(client.aclose())


@pytest.fixture
def thinking_client(make_client):
    """Of a server whose model marks its reasoning."""
    return make_client(replace(CARD, context_length=10_000), ThinkingTokenizer())


@pytest.fixture(scope="session")
def document():
    """The OpenAPI document, which takes long to make. Not to be changed."""
    model = OneModel(ByteTokenizer(), CARD)
    app = create_app(Backend(FakeEngine(), FakeAdapters(), model, ServerConfig(), FakeTraining()))

    async def get():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
            return (await client.get("/openapi.json")).json()

    return asyncio.run(get())


@pytest.fixture
def serving(engine, adapters, training):
    """`async with serving(**settings) as server`: a real uvicorn on a free port (`server.port`, `.app`, `.url`)."""

    @contextlib.asynccontextmanager
    async def serve(card=CARD, **settings):
        settings = {"shutdown_timeout": 5.0, **settings}
        model = OneModel(ByteTokenizer(), card)
        app = create_app(Backend(engine, adapters, model, ServerConfig(**settings), training))
        listening = bind("127.0.0.1", 0)
        port = listening.getsockname()[1]
        started = asyncio.Event()
        uvicorn_server = DrainingServer(app, started.set)
        task = asyncio.create_task(uvicorn_server.serve(sockets=[listening]))
        await started.wait()
        server = SimpleNamespace(
            app=app, port=port, url=f"http://127.0.0.1:{port}", uvicorn=uvicorn_server, stopped=task
        )
        try:
            yield server
        finally:
            uvicorn_server.should_exit = True
            await task

    return serve


@pytest.fixture
def metric():
    """`await metric(client, name)` → the value of one sample, labels written as Prometheus writes them, without the
    name of the only model."""

    async def read(client, name):
        text = (await client.get("/metrics")).text
        text = text.replace(f'{{model_name="{CARD.name}"}}', "").replace(f'model_name="{CARD.name}",', "")
        lines = text.replace(f',model_name="{CARD.name}"', "").splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name), 0.0)

    return read
