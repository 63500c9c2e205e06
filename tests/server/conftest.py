"""Fake engine, adapters and training, a byte-level tokenizer: HTTP tests need no model, and know every byte."""

import asyncio
import codecs
import contextlib
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest

from mlx_parallm.core import (
    BASE_ADAPTER,
    AdapterCard,
    AdapterRef,
    AdapterStats,
    CheckpointCard,
    EngineStats,
    FinishReason,
    ModelCard,
    PromptScored,
    RequestFailed,
    RequestFinished,
    Residence,
    SequenceOutput,
    TokenLogprob,
    TrainingStatus,
    UpdateReport,
)
from mlx_parallm.errors import (
    ConflictError,
    EngineDeadError,
    InvalidRequestError,
    UnknownModelError,
    UnknownTrajectoryError,
)
from mlx_parallm.server import ServerSettings, create_app
from mlx_parallm.server.run import DrainingServer, bind

VOCAB = 258
EOS = 257
CARD = ModelCard("tiny/byte-model", 64, VOCAB, "none", "float32", 1000, 4000)


class ByteTokenizer:
    """One token per UTF-8 byte; 256 is BOS (never added), 257 EOS."""

    vocab_size = VOCAB
    eos_token = "<eos>"
    bos_token = "<bos>"
    eos_token_ids = frozenset({EOS})
    chat_template = "a template"

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())

    def decode(self, token_ids, skip_special_tokens=False):
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < 256 else {256: b"<bos>", EOS: b"<eos>"}[token_id]

    def apply_chat_template(self, messages, add_generation_prompt=True, **kwargs):
        if messages[-1]["content"] == "refuse":
            raise InvalidRequestError("the template refuses these messages", param="messages")
        turns = "".join(f"{message['role'][0]}:{message['content']}\n" for message in messages)
        options = "".join(f"{name}={value}\n" for name, value in kwargs.items())
        return self.encode(turns + options + ("a:" if add_generation_prompt else ""))


def logprob_of(token_id, top):
    """The drawn token is the best, then its successors: -0.5, -1.5, -2.5 …"""
    best = tuple(((token_id + k) % 256, -0.5 - k) for k in range(top))
    return TokenLogprob(token_id, -0.5, best)


class FakeEngine:
    """Says `text` on every choice, one byte a step, cut at max_tokens.

    `pause_before` k: stops before the k-th event of each request until `resume` is set, and sets `paused`.
    `fail_before` k: the k-th event is RequestFailed(`error`).
    `hold_calls`: `reschedule` and `sleep` wait for `let_go`, having set `called`; `call_error`: what they raise then.
    `schedules`: those put in force. `slept`: how often it gave its memory back.
    """

    def __init__(self):
        self.text = "Hi ä!"
        self.stop_reason = None
        self.silent_end = False  # the last token adds no text, as EOS does not
        self.pause_before = None
        self.fail_before = None
        self.error = None
        self.cached_tokens = 0
        self.paused = asyncio.Event()
        self.resume = asyncio.Event()
        self.requests = []
        self.live = set()
        self.aborted = 0
        self.hold_calls = False
        self.called = asyncio.Event()
        self.let_go = asyncio.Event()
        self.call_error = None
        self.schedules = []
        self.slept = 0
        self.state = {"alive": True, "ready": True, "kv_bytes_held": 10, "kv_bytes_budget": 40, "running": 3}

    def stats(self):
        return EngineStats(**self.state, waiting=0, aborted_total=self.aborted, detail={"rows": []})

    async def reschedule(self, schedule):
        await self._call()
        self.schedules.append(schedule)
        self.state["schedule"] = schedule

    async def sleep(self):
        assert not self.live
        await self._call()
        self.slept += 1

    async def _call(self):
        self.called.set()
        if self.hold_calls:
            await self.let_go.wait()
        if self.call_error:
            raise self.call_error

    async def generate(self, request):
        if not self.state["alive"]:
            raise EngineDeadError("gone")
        self.requests.append(request)
        self.live.add(request.request_id)
        finished = False
        try:
            for step, event in enumerate(self._events(request)):
                if step == self.pause_before:
                    self.paused.set()
                    await self.resume.wait()
                await asyncio.sleep(0)
                if step == self.fail_before:
                    finished = True
                    yield RequestFailed(self.error)
                    return
                finished = isinstance(event, RequestFinished)
                yield event
        finally:
            self.live.remove(request.request_id)
            self.aborted += not finished

    def _events(self, request):
        if request.prompt_logprobs is not None:
            for number, prompt in enumerate(request.prompts):
                scores = tuple(logprob_of(token, request.prompt_logprobs) for token in prompt[1:])
                yield PromptScored(number, (None, *scores))
        tokens = list(self.text.encode())[: request.stopping.max_tokens]
        if not tokens:
            for index in range(request.sequences):
                yield SequenceOutput(index, (), "", finish_reason=FinishReason.LENGTH)
        decoders = [codecs.getincrementaldecoder("utf-8")() for _ in range(request.sequences)]
        for step, token in enumerate(tokens):
            for index, decoder in enumerate(decoders):
                yield self._output(request, index, token, decoder.decode(bytes([token])), step == len(tokens) - 1)
        yield self._finished(request, len(tokens) * request.sequences)

    def _output(self, request, index, token, text, last):
        top = request.sampling.top_logprobs
        logprobs = () if top is None else (logprob_of(token, top),)
        if not last:
            return SequenceOutput(index, (token,), text, logprobs)
        cut = len(self.text.encode()) > request.stopping.max_tokens
        reason = FinishReason.LENGTH if cut else FinishReason.STOP
        text = "" if self.silent_end else text
        return SequenceOutput(index, (token,), text, logprobs, reason, self.stop_reason)

    def _finished(self, request, completion_tokens):
        now = time.monotonic()
        prompt_tokens = sum(map(len, request.prompts))
        collected = range(request.sequences) if request.collection else ()
        ids = tuple(f"traj-{index}" for index in collected)
        return RequestFinished(
            prompt_tokens, completion_tokens, now - 0.4, now - 0.3, now - 0.2, now, self.cached_tokens, ids
        )


class FakeAdapters:
    """Versions without weights: every `load` and `publish` is a new one, which its name then means.

    `error`: what the next awaited call raises. `hold`: awaited calls wait for `resume`, having set `held`.
    `asked`: every selector that a lease or a lookup was asked for. `leased` counts the leases held now.
    """

    def __init__(self):
        self.known = {}
        self.shares = {"base": 1.0}
        self.before = []
        self.saved = []
        self.asked = []
        self.leased = 0
        self.error = None
        self.hold = False
        self.held = asyncio.Event()
        self.resume = asyncio.Event()
        self.state = AdapterStats(slots=4)

    def publish(self, name):
        version = max((ref.version for ref in self.known if ref.name == name), default=0) + 1
        ref = AdapterRef(name, version)
        self.known[ref] = AdapterCard(ref, True, Residence.SLOT, "", 8, 16.0, ("q_proj",), 64, 1_800_000_000)
        self._revive(ref)
        return ref

    def lease(self, selector):
        return self._leased(self._ref(max(self.shares, key=self.shares.get) if selector is None else selector))

    def find(self, selector):
        ref = self._ref(selector)
        if ref == BASE_ADAPTER:
            raise UnknownModelError("base is no adapter")
        return self.known[ref]

    def cards(self):
        return tuple(self.known[ref] for ref in sorted(self.known, key=str))

    async def load(self, name, path, replace):
        await self._work()
        if not replace and any(ref.name == name for ref in self.known):
            raise InvalidRequestError(f"the name {name!r} is taken; send load_inplace: true to replace it")
        return self.known[self.publish(name)]

    async def unload(self, selector):
        await self._work()
        gone = tuple(ref for ref in self.known if selector in (ref.name, str(ref)))
        if not gone:
            raise UnknownModelError(f"no adapter {selector!r}")
        if selector in self.shares:
            raise ConflictError("a route leads to it")
        for ref in gone:
            del self.known[ref]
        return gone

    def route(self):
        return dict(self.shares)

    async def set_route(self, weights):
        await self._work()
        for selector in weights:
            self._ref(selector)
        self.before.append(self.shares)
        self.shares = {selector: weight / sum(weights.values()) for selector, weight in weights.items()}
        return self.route()

    async def rollback(self, name):
        await self._work()
        if name is None:
            if not self.before:
                raise ConflictError("the route was never changed")
            self.shares = self.before.pop()
            return self._ref(max(self.shares, key=self.shares.get)), self.route()
        live = self._ref(name)
        if live.version == 1:
            raise ConflictError(f"{name} has only one version")
        self._revive(AdapterRef(name, live.version - 1))
        return self._ref(name), self.route()

    def checkpoints(self):
        return tuple(self.saved)

    async def save_checkpoint(self, selector, step, tags, metrics):
        await self._work()
        step = len(self.saved) + 1 if step is None else step
        if any(card.step == step for card in self.saved):
            raise ConflictError(f"there is a checkpoint-{step} with other content")
        tags = ("latest", *tags)
        ref = self._ref(selector or "math")
        self.saved.append(CheckpointCard(f"checkpoint-{step}", ref, step, "/secret", 1_800_000_000, tags, metrics))
        return self.saved[-1]

    def stats(self):
        return self.state

    @contextlib.contextmanager
    def _leased(self, ref):
        self.leased += 1
        try:
            yield ref
        finally:
            self.leased -= 1

    def _ref(self, selector):
        self.asked.append(selector)
        live = {ref.name: ref for ref, card in self.known.items() if card.live}
        named = {"base": BASE_ADAPTER, **live, **{str(ref): ref for ref in self.known}}
        if selector not in named:
            raise UnknownModelError(f"no adapter {selector!r}")
        return named[selector]

    def _revive(self, live):
        for ref, card in self.known.items():
            if ref.name == live.name:
                self.known[ref] = replace(card, live=ref == live)

    async def _work(self):
        self.held.set()
        if self.hold:
            await self.resume.wait()
        if self.error:
            raise self.error


class FakeTraining:
    """Trains the adapters of `state`, `policy` by default; has the scorer `exact`, which reads `metadata.answer`.

    `checked`: (collection, adapter) of each check, `check_threads` the threads they came on. `calls`: what else was
    asked. `saves`: names that `trains` says yes to. `error`, `hold`, `held`, `resume_work`: as the adapters'. `told`:
    the events, the last one None; `listening`: listeners now.
    """

    def __init__(self):
        self.state = {"policy": TrainingStatus(enabled=True, state="running", adapter="policy", trained=("policy",))}
        self.report = UpdateReport(AdapterRef("policy", 2), 1, "published")
        self.known = {"traj-0"}
        self.cards = ()
        self.checked = []
        self.check_threads = []
        self.calls = []
        self.error = None
        self.hold = False
        self.held = asyncio.Event()
        self.resume_work = asyncio.Event()
        self.told = asyncio.Queue()
        self.saves = ()
        self.listening = 0

    def check(self, collection, adapter):
        self.check_threads.append(threading.current_thread())
        self.checked.append((collection, adapter))
        if self.error:
            raise self.error
        if collection.scorer not in (None, "exact"):
            raise InvalidRequestError(f"unknown scorer {collection.scorer!r}", param="scoring_function")
        if collection.scorer and "answer" not in collection.metadata:
            raise InvalidRequestError("exact reads metadata.answer", param="metadata")

    def feedback(self, trajectory_id, score):
        if self.error:
            raise self.error
        if trajectory_id not in self.known:
            raise UnknownTrajectoryError(f"no trajectory {trajectory_id!r}", param="trajectory_id")
        self.calls.append(("feedback", trajectory_id, score))

    async def update(self, adapter=None, given=None, publish=True, checkpoint_name=None):
        await self._work("update", adapter, given, publish, checkpoint_name)
        return self.report

    def status(self, adapter=None):
        name = "policy" if adapter is None else adapter
        if name not in self.state:
            raise UnknownModelError(f"no adapter {name!r} is trained here")
        return self.state[name]

    async def start(self, adapter=None):
        name = adapter or "policy"
        trained = (*self.state, name) if name not in self.state else tuple(self.state)
        self.state = {known: replace(status, trained=trained) for known, status in self.state.items()}
        self.state.setdefault(name, TrainingStatus(enabled=True, state="idle", adapter=name, trained=trained))
        return await self._work("start", adapter)

    async def pause(self, adapter=None):
        return await self._work("pause", adapter)

    async def resume(self, adapter=None):
        return await self._work("resume", adapter)

    async def rollback(self, adapter=None, to=None):
        if to == "nope":
            raise UnknownModelError("no checkpoint 'nope'")
        return await self._work("rollback", adapter, to)

    def trains(self, selector):
        return (selector or "math") in self.saves

    async def save(self, adapter, step, tags, metrics):
        await self._work("save", None, adapter, step, tags, metrics)
        return CheckpointCard("checkpoint-9", AdapterRef("math", 2), 9, "/secret", 1_800_000_000, tuple(tags), metrics)

    async def events(self):
        self.listening += 1
        try:
            while (event := await self.told.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.listening -= 1

    def trajectories(self, limit):
        return self.cards[:limit]

    async def _work(self, name, adapter, *arguments):
        status = self.status(adapter)
        self.held.set()
        if self.hold:
            await self.resume_work.wait()
        if self.error:
            raise self.error
        self.calls.append((name, adapter, *arguments))
        return status


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
def make_client(engine, adapters, training):
    """`make_client(**settings)` → an httpx client on an in-process app; `client.app` is the app."""

    def make(**settings):
        app = create_app(engine, adapters, training, ByteTokenizer(), CARD, ServerSettings(**settings))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost:8000")
        client.app = app
        return client

    return make


@pytest.fixture
def client(make_client):
    return make_client()


@pytest.fixture
def serving(engine, adapters, training):
    """`async with serving(**settings) as server`: a real uvicorn on a free port (`server.port`, `.app`, `.url`)."""

    @contextlib.asynccontextmanager
    async def serve(shutdown_timeout_s=5.0, **settings):
        app = create_app(engine, adapters, training, ByteTokenizer(), CARD, ServerSettings(**settings))
        listening = bind("127.0.0.1", 0)
        port = listening.getsockname()[1]
        started = asyncio.Event()
        uvicorn_server = DrainingServer(app, shutdown_timeout_s, started.set)
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
    """`await metric(client, name)` → the value of one sample, labels written as Prometheus writes them."""

    async def read(client, name):
        lines = (await client.get("/metrics")).text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name), 0.0)

    return read


@pytest.fixture
def fault():
    """`fault(response)` → the error object, having checked the envelope that every error has."""

    def check(response):
        assert response.headers["content-type"].startswith("application/json")
        assert set(response.json()) == {"error"}
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return error

    return check
