"""Ollama's API: what is asked of the engine, the models, errors, and where it is served."""

import json
import re
from dataclasses import replace

import pytest
from server.asking import answered
from server.fakes import CARD, ByteTokenizer, RecordingTokenizer

from mlx_parallm.core.text import Reasoning

CHAT, GENERATE = "/api/chat", "/api/generate"
USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}


class PlainTokenizer(ByteTokenizer):
    chat_template = None


@pytest.fixture
def tokenizer():
    return RecordingTokenizer()


@pytest.fixture
def connect(make_client, tokenizer):
    def make(tokenizer=tokenizer, card=CARD, atropos=None, **settings):
        return make_client(replace(card, architecture="llama"), tokenizer, atropos, **settings)

    return make


@pytest.fixture
def client(connect):
    return connect()


async def post(client, path, status=200, **body):
    return await answered(client, path, {"stream": False, **body} if path in (CHAT, GENERATE) else body, status)


async def error(client, path, status=400, **body):
    answer = await post(client, path, status, **body)
    assert set(answer) == {"error"}
    return answer["error"]


# -- what is asked of the engine -----------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{}, {"num_predict": -1}, {"num_predict": -2}, {"num_predict": 9999}])
@pytest.mark.parametrize("body", [{"prompt": "x"}, {"prompt": "x", "raw": True}])
async def test_an_answer_may_fill_the_context(client, engine, limit, body):
    await post(client, GENERATE, **body, options=limit)
    request = engine.requests[0]
    assert request.stopping.max_tokens == CARD.context_length - len(request.prompts[0])


async def test_defaults_are_the_models_own(connect, engine):
    card = replace(CARD, generation_defaults={"temperature": 0.6, "max_new_tokens": 9})
    async with connect(card=card) as client:
        await post(client, CHAT, messages=USER, options={"seed": -1})
        await post(client, CHAT, messages=USER, options={"seed": -1, "num_predict": -1})
        await post(client, GENERATE, prompt="x", raw=True)
        shown = await post(client, "/api/show", model="base")
    first, second, third = engine.requests
    assert (first.sampling.temperature, third.sampling.temperature) == (0.6, 0.6)
    assert (first.stopping.max_tokens, second.stopping.max_tokens, third.stopping.max_tokens) == (9, 57, 9)
    assert first.sampling.seed != second.sampling.seed
    lines = dict(line.split() for line in shown["parameters"].splitlines())
    assert lines == {"num_ctx": "64", "temperature": "0.6", "num_predict": "9"}


async def test_options_that_mean_nothing_here(client):
    options = {"num_ctx": 4096, "num_thread": 8, "mirostat": 2, "made_up": 1, "stop": None}
    response = await client.post(CHAT, json={"messages": USER, "tools": [], "options": options, "width": 5})
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "width, options.mirostat, options.made_up"


async def test_thinking_is_a_switch_of_the_template(client, tokenizer):
    for think, expected in (
        (True, {"enable_thinking": True, "thinking": True}),
        (False, {"enable_thinking": False, "thinking": False}),
        ("high", {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    ):
        await post(client, CHAT, messages=USER, think=think)
        assert tokenizer.given[1] == expected
    assert await error(client, CHAT, messages=USER, think="very") == (
        "think: must be true, false or one of low, medium, high, max"
    )


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"prompt": "x", "raw": True}])
async def test_a_format_is_enforced(client, engine, body):
    await post(client, GENERATE, **body, format="")
    await post(client, GENERATE, **body, format="json")
    await post(client, GENERATE, **body, format=PARAMETERS)
    assert [request.grammar is not None for request in engine.requests] == [False, True, True]
    assert (await error(client, GENERATE, **body, format="yaml")).startswith("format: must be")
    assert (await error(client, GENERATE, **body, format={"type": 5})).startswith("format: ")


async def test_the_conversation_of_an_agent(client, tokenizer):
    def call(name, **arguments):
        return {"function": {"name": name, "arguments": arguments}}

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add."},
        {"role": "assistant", "thinking": "Hm.", "tool_calls": [call("add", a=1), call("add", a=2), call("now")]},
        {"role": "tool", "content": "12:00", "tool_name": "now"},
        {"role": "tool", "content": "1", "tool_name": "add"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "tool_calls": [{"id": "mine", **call("add", a=3)}, call("now")]},
        {"role": "tool", "content": "12:01", "tool_name": "now"},
        {"role": "tool", "content": "3", "tool_call_id": "mine"},
    ]
    await post(client, CHAT, messages=messages, tools=[ADD])
    turns, variables = tokenizer.given
    assert variables["tools"] == [ADD]
    assert (turns[0], turns[1]["content"]) == ({"role": "system", "content": "Be brief."}, "Add.")
    assert turns[2]["reasoning_content"] == "Hm."
    assert [call["function"] for call in turns[2]["tool_calls"]] == [
        {"name": "add", "arguments": {"a": 1}},
        {"name": "add", "arguments": {"a": 2}},
        {"name": "now", "arguments": {}},
    ]
    ids = [call["id"] for turn in turns for call in turn.get("tool_calls", ())]
    assert len(set(ids)) == 5
    results = [(turn["content"], turn["tool_call_id"]) for turn in turns if turn["role"] == "tool"]
    assert results == [("12:00", ids[2]), ("1", ids[0]), ("2", ids[1]), ("12:01", ids[4]), ("3", "mine")]


async def test_a_system_message_and_a_model_without_a_template(client, connect, engine, tokenizer):
    await post(client, GENERATE, prompt="x", system="s")
    assert [turn["role"] for turn in tokenizer.given[0]] == ["system", "user"]
    async with connect(PlainTokenizer()) as plain:
        await post(plain, GENERATE, prompt="x", system="s")
    assert bytes(engine.requests[-1].prompts[0]) == b"s\n\nx"
    assert await error(client, GENERATE, prompt="x", system="s", raw=True) == (
        "system: cannot be combined with raw, which uses no chat template"
    )


# -- without a prompt ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [(None, "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0", "unload"), ("0s", "unload"), (0.0, "unload")],
)
async def test_without_a_prompt_nothing_is_generated(client, engine, adapters, keep_alive, reason):
    adapters.publish("math")
    chat = await post(client, CHAT, model="math:latest", keep_alive=keep_alive)
    assert (chat["message"], chat["done"], chat["done_reason"]) == ({"role": "assistant", "content": ""}, True, reason)
    generated = await post(client, GENERATE, model="base", keep_alive=keep_alive)
    assert (generated["model"], generated["response"], generated["done_reason"]) == ("tiny/byte-model", "", reason)
    assert (await post(client, "/api/embed", model="base"))["embeddings"] == []
    assert await post(client, "/api/embeddings", model="base") == {"embedding": []}
    assert not engine.requests
    assert "nobody" in await error(client, CHAT, 404, model="nobody")


# -- models ----------------------------------------------------------------------------------------------


async def test_models(client, adapters):
    adapters.publish("math")
    listed = (await client.get("/api/tags")).json()["models"]
    assert [(model["name"], model["model"]) for model in listed] == [("tiny/byte-model",) * 2, ("math", "math")]
    assert listed[0]["details"] == {
        "parent_model": "",
        "format": "mlx",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "0.0M",
        "quantization_level": "float32",
    }
    assert listed[1]["details"]["parent_model"] == "tiny/byte-model"
    assert all(re.fullmatch("[0-9a-f]{64}", model["digest"]) for model in listed)
    assert listed[0]["digest"] != listed[1]["digest"]
    running = (await client.get("/api/ps")).json()["models"]
    assert [model["name"] for model in running] == ["tiny/byte-model", "math"]
    assert running[0]["expires_at"] > "2100"
    assert (running[0]["size"], running[0]["size_vram"], running[0]["context_length"]) == (4000, 4000, 64)
    for model in listed:  # every name that is listed can be asked
        for name in (model["model"], f"{model['model']}:latest"):
            assert (await post(client, CHAT, model=name, messages=USER))["model"] == model["model"]
            assert (await post(client, "/api/show", model=name))["details"] == model["details"]


async def test_what_a_model_can_do(connect, client):
    shown = await post(client, "/api/show", name="base")
    assert shown["model_info"] == {
        "general.architecture": "llama",
        "general.parameter_count": 1000,
        "llama.context_length": 64,
    }
    assert (shown["template"], shown["capabilities"]) == ("a template", ["completion", "tools", "embedding"])
    plain = PlainTokenizer()
    plain.reasoning = Reasoning("<think>", "</think>")
    async with connect(plain) as other:
        shown = await post(other, "/api/show", model="base", verbose=True)
    assert (shown["template"], shown["capabilities"]) == ("", ["completion", "thinking", "embedding"])


async def test_vectors(client):
    answer = await post(client, "/api/embed", model="base", input=["a", "bc"], dimensions=2, options={"num_ctx": 5})
    vectors = [[1, ord("a")], [2, ord("b") + ord("c")]]
    for got, (x, y) in zip(answer["embeddings"], vectors, strict=True):
        length = (x * x + y * y) ** 0.5
        assert got == pytest.approx([x / length, y / length])
    assert (answer["model"], answer["prompt_eval_count"]) == ("tiny/byte-model", 3)
    assert set(answer) == {"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"}
    assert len((await post(client, "/api/embed", model="base", input="x" * 100))["embeddings"]) == 1
    refused = await error(client, "/api/embed", model="base", input="x" * 100, truncate=False)
    assert refused.endswith("shorten it, or leave truncate out.")


# -- errors, and where it is served ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": [{**USER[0], "images": ["aaaa"]}]}, "messages[0].images: not supported by this server"),
        (GENERATE, {"prompt": "x", "images": ["aaaa"]}, "images: not supported by this server"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "suffix: not supported by this server"),
        (CHAT, {"messages": USER, "options": {"temperature": "hot"}}, "options.temperature: "),
        (CHAT, {"messages": USER, "options": {"num_predict": 1.5}}, "options.num_predict: "),
        (CHAT, {"messages": USER, "keep_alive": [1]}, "keep_alive: must be"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: "),
        (CHAT, {"messages": USER, "tools": [ADD, ADD]}, "tools: two functions have the same name"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 99}]}, "the prompt is longer"),
        (GENERATE, {"prompt": "x" * 64, "raw": True}, "This model's maximum context length is 64 tokens"),
        (GENERATE, {"prompt": "x", "top_logprobs": 2}, "top_logprobs: needs logprobs: true"),
        ("/api/embed", {"input": 5}, "input"),
    ],
)
async def test_bad_requests(client, engine, path, body, message):
    assert (await error(client, path, model="base", **body)).startswith(message)
    assert not engine.requests


@pytest.mark.parametrize("kind", [None, "text/plain", "application/octet-stream"])
async def test_a_body_may_say_that_it_is_of_any_type(client, kind):
    """litellm's Ollama providers name none."""
    headers = {} if kind is None else {"content-type": kind}
    bodies = {CHAT: {"messages": USER}, GENERATE: {"prompt": "x"}, "/api/show": {}}
    bodies |= {"/api/embed": {"input": "x"}, "/api/embeddings": {"prompt": "x"}}
    for path, body in bodies.items():
        content = json.dumps({"model": "base", "stream": False, **body}).encode()
        response = await client.post(path, content=content, headers=headers)
        assert response.status_code == 200, response.text
        other = {**headers, "origin": "http://elsewhere.example"}
        assert (await client.post(path, content=content, headers=other)).status_code == 403


async def test_errors_of_all_kinds_have_ollamas_form(connect):
    async with connect(api_key="k" * 32) as client:
        assert "API key" in await error(client, CHAT, 401, messages=USER)
        assert (await client.get("/api/nothing", headers={"authorization": f"Bearer {'k' * 32}"})).json() == {
            "error": "No such route."
        }
    async with connect() as client:
        response = await client.post(CHAT, content=b"{", headers={"content-type": "application/json"})
        assert (response.status_code, set(response.json())) == (400, {"error"})
        assert set((await client.get("/api/v1/nothing")).json()["error"]) == {"message", "type", "param", "code"}


async def test_the_root_tells_programs_and_browsers_apart(client):
    for accept in ("*/*", "application/json", ""):
        response = await client.get("/", headers={"accept": accept})
        assert (response.status_code, response.text) == (200, "Ollama is running")
    head = await client.head("/")
    assert (head.status_code, head.content) == (200, b"")
    page = await client.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")


async def test_it_can_be_turned_off(connect):
    async with connect(ollama_api=False) as client:
        for path in (CHAT, GENERATE, "/api/embed", "/api/embeddings", "/api/show"):
            assert (await client.post(path, json={})).status_code == 404
        for path in ("/api/tags", "/api/ps", "/api/version"):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/")).text == "MLX ParaLLM is running"
