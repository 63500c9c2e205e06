"""The outside inference engines: what each kind of server is asked, what its answers become, and what is refused.

vLLM, SGLang and MAX cannot run here. Their transcripts are written after the code of the published packages; each says
which in `about`. tests/app/test_split_mode.py runs against real servers.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rl.engine_server import TranscriptServer, serving, transcript

from mlx_parallm.core import (
    AdapterRef,
    FinishReason,
    GenerationRequest,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.errors import ConfigError, EngineError
from mlx_parallm.rl.inference.http import EngineServer
from mlx_parallm.rl.inference.max import MaxApi
from mlx_parallm.rl.inference.mlx import MlxApi
from mlx_parallm.rl.inference.openai import OpenAIApi, VllmApi
from mlx_parallm.rl.inference.outside import OutsideEngine
from mlx_parallm.rl.inference.sglang import SglangApi
from mlx_parallm.rl.inference.sync import AdapterSync

PROMPT, EOS = (5, 6, 7), 2
VERSION = AdapterRef("policy", 3)
REQUEST = GenerationRequest(
    "r", (PROMPT,), SamplingParams(temperature=1.0, seed=40), StopParams(3), n=2, adapter=VERSION
)
SAMPLES = [((72, 73, 1), (-0.5, -1.25, -2.0)), ((72, EOS), (-0.5, -0.25))]
TEXTS = {5: "a", 6: "b", 7: "c", 72: "H", 73: "i", 1: "!", EOS: "</s>"}


class Tokenizer:
    """Tokens are single characters, and `</s>`."""

    vocab_size = 100

    def decode(self, ids: Any) -> str:
        return "".join(TEXTS.get(token, f"<{token}>") for token in ids)

    def encode(self, text: str) -> list[int]:
        return [{text: token for token, text in TEXTS.items()}[character] for character in text]


APIS: dict[str, Callable[[EngineServer], Any]] = {
    "openai": lambda server: OpenAIApi(server, None),
    "vllm": lambda server: VllmApi(server, None),
    "sglang": SglangApi,
    "max": lambda server: MaxApi(server, None, Tokenizer()),
    "mlx": lambda server: MlxApi(server, "org/model", Tokenizer()),
}


@dataclass
class Made:
    engine: OutsideEngine
    folder: Path
    written: list[tuple[AdapterRef, str]]


def make(kind: str, url: str, folder: Path, own: Callable[[int], float] = lambda token: -1.0, key: str = "") -> Made:
    """`own`: the logprob that the model here gives a token."""
    server = EngineServer(kind, url, key, timeout_s=5)
    api = APIS[kind](server)
    written: list[tuple[AdapterRef, str]] = []

    async def write(ref: AdapterRef, at: Path, form: str) -> None:
        at.mkdir(parents=True)
        written.append((ref, form))

    async def score(prompt: Any, completion: Any, ref: AdapterRef) -> list[float]:
        return [own(token) for token in completion]

    sync = AdapterSync(api, folder, write)
    text_of = lambda prompt, ids: Tokenizer().decode(token for token in ids if token != EOS)  # noqa: E731
    return Made(
        OutsideEngine(server, api, sync, text_of, frozenset({EOS}), Tokenizer.vocab_size, PROMPT, score),
        folder,
        written,
    )


def exchanges_of(name: str, skip: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    return [exchange for exchange in transcript(name)["exchanges"] if exchange["route"].split("/")[-1] not in skip]


def answers_of(exchanges: list[dict[str, Any]]) -> list[tuple[str, int, Any]]:
    return [(exchange["route"], exchange["status"], exchange["answer"]) for exchange in exchanges]


async def answered(engine: OutsideEngine, request: GenerationRequest = REQUEST) -> list[Any]:
    return [event async for event in engine.generate(request)]


def asked_of(server: TranscriptServer, folder: Path) -> list[tuple[str, Any]]:
    """With NAME for the adapter's name, which differs from run to run, and FOLDER for the folder."""
    (name,) = {body["lora_name"] for _, body in server.asked if isinstance(body, dict) and "lora_name" in body}
    assert name.startswith("policy-")
    assert name.endswith("-3")
    text = json.dumps(server.asked).replace(name, "NAME").replace(str(folder), "FOLDER")
    return [(route, body) for route, body in json.loads(text)]


@pytest.mark.parametrize("kind", ["vllm", "sglang", "max"])
async def test_a_draw_is_the_transcript(kind: str, tmp_path: Path) -> None:
    exchanges = exchanges_of(kind)
    with serving(answers_of(exchanges)) as server:
        made = make(kind, server.url, tmp_path / "sent")
        await made.engine._api.connect()
        events = await answered(made.engine)
        await made.engine.close()
    assert server.answers == []
    assert asked_of(server, made.folder) == [(exchange["route"], exchange.get("body")) for exchange in exchanges]
    assert made.written == [(VERSION, "peft")]
    assert not made.folder.exists(), "nothing is left behind"
    outputs, finished = events[:-1], events[-1]
    assert all(isinstance(event, SequenceOutput) for event in outputs)
    assert [(o.index, o.token_ids, o.sampling_logprobs) for o in outputs] == [
        (index, *sample) for index, sample in enumerate(SAMPLES)
    ]
    assert [o.text for o in outputs] == ["Hi!", "H"]
    assert [o.finish_reason for o in outputs] == [FinishReason.LENGTH, FinishReason.STOP]
    assert isinstance(finished, RequestFinished)
    assert (finished.prompt_tokens, finished.completion_tokens) == (3, 5)


COMPLETION = exchanges_of("vllm")[2]["answer"]


def mlx_answer(ids: list[int], prompt_tokens: int = 3) -> dict[str, Any]:
    content = [{"id": token, "logprob": -0.5} for token in ids]
    choice = {"index": 0, "finish_reason": "stop", "logprobs": {"content": content}, "text": ""}
    return {"choices": [choice], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": len(ids)}}


async def test_mlx_gets_a_text_and_a_folder_in_each_request(tmp_path: Path) -> None:
    answers = [("POST /v1/completions", 200, mlx_answer([72, EOS]))] * 2
    with serving(answers) as server:
        made = make("mlx", server.url, tmp_path / "sent")
        events = await answered(made.engine)
        await made.engine.close()
    assert [(event.token_ids, event.sampling_logprobs) for event in events[:-1]] == [((72, EOS), (-0.5, -0.5))] * 2
    assert made.written == [(VERSION, "mlx-lm")]
    for _, body in server.asked:
        assert body.pop("adapters").startswith(f"{made.folder}/policy-")
        assert body == {
            **{"model": "org/model", "prompt": "abc", "max_tokens": 3, "temperature": 1.0, "logprobs": True},
            **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 0.0},
        }


async def test_mlx_refuses_a_prompt_that_was_tokenised_otherwise(tmp_path: Path) -> None:
    with serving([("POST /v1/completions", 200, mlx_answer([72, EOS], prompt_tokens=4))] * 2) as server:
        made = make("mlx", server.url, tmp_path)
        with pytest.raises(EngineError, match="made 4 tokens of a prompt of 3"):
            await answered(made.engine)
        await made.engine.close()


async def test_the_lora_routes_at_the_root_are_tried_last(tmp_path: Path) -> None:
    answers = [
        ("POST /v1/load_lora_adapter", 404, {"detail": "Not Found"}),
        ("POST /load_lora_adapter", 200, ""),
        ("POST /v1/completions", 200, COMPLETION),
        ("POST /v1/unload_lora_adapter", 404, {"detail": "Not Found"}),
        ("POST /unload_lora_adapter", 200, ""),
    ]
    with serving(answers) as server:
        made = make("openai", server.url, tmp_path)
        assert len(await answered(made.engine)) == 3
        await made.engine.close()
    assert server.answers == []


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    answer = copy.deepcopy(COMPLETION)
    node = answer
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    return answer


CHOICE = ["choices", 1]
UNUSABLE = [
    (changed([*CHOICE, "token_ids"], None), "gives no token ids"),
    (changed([*CHOICE, "token_ids"], ["72", "2"]), "gives no token ids"),
    (changed([*CHOICE, "logprobs"], None), "gives no logprobs"),
    (changed([*CHOICE, "logprobs", "token_logprobs"], [-0.5, None]), "gives no logprobs"),
    (changed([*CHOICE, "logprobs", "token_logprobs"], [-0.5, -9999.0]), "gives no logprobs"),
    (changed([*CHOICE, "logprobs", "token_logprobs"], [-0.5]), "gives 1 logprobs for 2 tokens"),
    (COMPLETION, "ended an answer after 3 of 8 tokens without"),
    (changed(["choices", 0, "token_ids"], [72, 73, 100]), "drew token 100, which the model here does not have"),
    (changed(["choices"], COMPLETION["choices"][:1]), "gave 1 answers to a request for 2"),
    (changed(["choices"], None), "without choices"),
    ("<html>", "without choices"),
]


@pytest.mark.parametrize(("answer", "reason"), UNUSABLE, ids=[reason for _, reason in UNUSABLE])
async def test_an_engine_that_cannot_give_what_training_needs_is_refused_at_the_start(
    answer: Any, reason: str, tmp_path: Path
) -> None:
    before = answers_of(exchanges_of("vllm")[:2])
    with serving([*before, ("POST /v1/completions", 200, answer)]) as server:
        made = make("vllm", server.url, tmp_path)
        with pytest.raises(ConfigError, match=reason):
            await made.engine.open(VERSION)
        await made.engine.close()


def eight_tokens() -> dict[str, Any]:
    """An answer to the trial of `open`: an answer of the asked length, and one that ended."""
    answer = changed(["choices", 0, "token_ids"], [72] * 8)
    answer["choices"][0]["logprobs"]["token_logprobs"] = [-0.5] * 8
    return answer


@pytest.mark.parametrize(("own", "accepted"), [(-0.6, True), (-0.4, True), (-3.5, False)])
async def test_a_server_with_another_model_is_refused_at_the_start(own: float, accepted: bool, tmp_path: Path) -> None:
    before = answers_of(exchanges_of("vllm")[:2])
    with serving([*before, ("POST /v1/completions", 200, eight_tokens())]) as server:
        made = make("vllm", server.url, tmp_path, lambda token: own)
        if accepted:
            await made.engine.open(VERSION)
        else:
            with pytest.raises(ConfigError, match="serve the same base model"):
                await made.engine.open(VERSION)
        await made.engine.close()


async def test_a_server_that_takes_no_lora_is_refused_with_the_remedy(tmp_path: Path) -> None:
    models = answers_of(exchanges_of("vllm")[:1])
    for kind, status, reason in (
        ("vllm", 404, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ("max", 501, "LoRA functionality is not enabled"),
    ):
        refusal = ("POST /v1/load_lora_adapter", status, {"detail": "LoRA functionality is not enabled"})
        with serving([*models, refusal]) as server:
            made = make(kind, server.url, tmp_path)
            with pytest.raises(ConfigError, match=reason):
                await made.engine.open(VERSION)
            await made.engine.close()
            assert list(tmp_path.iterdir()) == [], "no file is left of it"


async def test_max_refuses_a_text_that_several_tokens_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEXTS, 50, "H")
    with serving(answers_of(exchanges_of("max")[1:])) as server:
        made = make("max", server.url, tmp_path)
        with pytest.raises(EngineError, match="can be 2 tokens"):
            await answered(made.engine)
        await made.engine.close()


async def test_a_server_that_is_not_there_is_said_to_be_unreachable(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("mlx_parallm.rl.inference.http._PAUSES_S", (0.01,))
    with serving([]) as server:
        url = server.url
    made = make("vllm", url, tmp_path)
    with pytest.raises(ConfigError, match="cannot be reached"):
        await made.engine.open(VERSION)
    await made.engine.close()


async def test_the_key_is_sent_and_not_shown(tmp_path: Path) -> None:
    with serving([("GET /v1/models", 401, {"error": "no"})]) as server:
        made = make("openai", f"{server.url}/v1/", tmp_path, key="secret-key")
        with pytest.raises(ConfigError, match="401") as refusal:
            await made.engine.open(VERSION)
        await made.engine.close()
    assert server.keys == ["Bearer secret-key"]
    assert "secret-key" not in str(refusal.value)


async def test_an_answer_that_never_ends_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.rl.inference.http.MAX_ANSWER_BYTES", 1 << 20)
    with serving([("GET /v1/models", 200, "x" * (1 << 21))]) as server:
        made = make("openai", server.url, tmp_path)
        with pytest.raises(ConfigError, match="more than 1 MiB"):
            await made.engine.open(VERSION)
        await made.engine.close()


# ---- the adapters in the server ------------------------------------------------------------------


class Api:
    """A server that notes what it has. `allowed`: loading waits for it."""

    adapter_format = "peft"
    logprobs_at_temperature = True

    def __init__(self) -> None:
        self.has: list[str] = []
        self.loads = 0
        self.allowed = asyncio.Event()
        self.allowed.set()
        self.fails = False

    async def load(self, adapter: Any) -> None:
        self.loads += 1
        await self.allowed.wait()
        if self.fails:
            raise EngineError("full")
        assert adapter.folder.is_dir(), "the files are there when the server is told"
        self.has.append(adapter.name)

    async def unload(self, adapter: Any) -> None:
        assert adapter.folder.is_dir(), "until the server has forgotten it"
        self.has.remove(adapter.name)


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def sync(api: Api, tmp_path: Path) -> AdapterSync:
    async def write(ref: AdapterRef, at: Path, form: str) -> None:
        await asyncio.sleep(0)
        at.mkdir(parents=True)

    return AdapterSync(api, tmp_path / "sent", write)


async def drawing(sync: AdapterSync, version: int, until: asyncio.Event | None = None) -> str | None:
    async with sync.use(AdapterRef("policy", version)) as adapter:
        if until:
            await until.wait()
        return adapter.name


async def test_a_version_is_sent_once(sync: AdapterSync, api: Api) -> None:
    names = await asyncio.gather(*(drawing(sync, 1) for _ in range(5)))
    assert api.loads == 1
    assert set(names) == set(api.has)
    await drawing(sync, 1)
    assert api.loads == 1, "nothing has changed since"


async def test_the_base_model_needs_no_files(sync: AdapterSync, api: Api, tmp_path: Path) -> None:
    async with sync.use(AdapterRef("base", 0)) as adapter:
        assert adapter is None
    assert (api.loads, list(tmp_path.iterdir())) == (0, [])


async def test_an_older_version_goes_when_nobody_draws_with_it(sync: AdapterSync, api: Api, tmp_path: Path) -> None:
    until = asyncio.Event()
    slow = asyncio.create_task(drawing(sync, 1, until))
    await asyncio.sleep(0.01)
    second = await drawing(sync, 2)
    assert len(api.has) == 2, "the first one draws still"
    until.set()
    first = await slow
    third = await drawing(sync, 3)
    assert len({first, second, third}) == 3
    assert api.has == [third]
    assert [path.name for path in (tmp_path / "sent").iterdir()] == [third]
    await sync.close()
    assert (api.has, (tmp_path / "sent").exists()) == ([], False)


async def test_a_failed_or_cancelled_load_leaves_no_files_and_may_be_tried_again(
    sync: AdapterSync, api: Api, tmp_path: Path
) -> None:
    api.fails = True
    with pytest.raises(EngineError, match="full"):
        await drawing(sync, 1)
    api.fails = False
    api.allowed.clear()
    cancelled = asyncio.create_task(drawing(sync, 1))
    await asyncio.sleep(0.01)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert list((tmp_path / "sent").iterdir()) == []
    api.allowed.set()
    assert await drawing(sync, 1) in api.has
