"""`/v1/embeddings`: bodies, vectors, and the openai client. What is pooled is in `tests/engine/test_pooling.py`."""

import base64

import numpy as np
import openai
import pytest
from server.asking import answered, refusal

from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import Pooling
from mlx_parallm.errors import StepFailedError
from mlx_parallm.server.api import bodies

URL = "/v1/embeddings"
MODEL = "tiny/byte-model"


async def embed(client, body, url=URL):
    return await answered(client, url, body)


def of(text, rest=(0.0, 2.0)):
    """What the fake engine pools `text` to, at length 1."""
    ids = list(text.encode()) if isinstance(text, str) else text
    vector = np.array([len(ids), sum(ids), *rest])
    return vector / np.linalg.norm(vector)


async def test_each_text_gets_a_vector_in_its_order(client, engine):
    answer = await embed(client, {"input": ["ab", "c"], "model": MODEL})
    (request,) = engine.requests
    assert (request.prompts, request.pooling, request.adapter) == (((97, 98), (99,)), Pooling.LAST, BASE_ADAPTER)
    data = answer.pop("data")
    assert [(item["object"], item["index"]) for item in data] == [("embedding", 0), ("embedding", 1)]
    for item, text in zip(data, ["ab", "c"], strict=True):
        assert item["embedding"] == pytest.approx(of(text), abs=1e-6)
    assert (answer["id"], answer["object"], answer["model"]) == (request.request_id, "list", MODEL)
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("form", ["float", "base64"])
async def test_dimensions_are_cut_before_the_length_becomes_1(client, form):
    answer = await embed(client, {"input": "ab", "dimensions": 2, "encoding_format": form})
    vector = answer["data"][0]["embedding"]
    if form == "base64":
        vector = np.frombuffer(base64.b64decode(vector), "<f4")
    expected = np.array([2, 195]) / np.linalg.norm([2, 195])
    assert list(vector) == pytest.approx(list(expected), abs=1e-6)


@pytest.mark.parametrize("field", ["normalize", "use_activation"])
async def test_vectors_keep_their_length_if_asked(client, field):
    answer = await embed(client, {"input": "ab", field: False})
    assert answer["data"][0]["embedding"] == [2.0, 195.0, 0.0, 2.0]


async def test_states_that_are_not_finite_are_an_error(client, engine):
    engine.rest = [float("nan")]
    await refusal(client.post(URL, json={"input": "a"}), 500, code="engine_error")


async def test_the_server_has_a_pooling_and_a_request_may_choose(make_client, engine):
    client = make_client(embedding_pooling="mean")
    await embed(client, {"input": "a"})
    await embed(client, {"input": "a", "pooling": "last"})
    assert [request.pooling for request in engine.requests] == [Pooling.MEAN, Pooling.LAST]


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"truncate_prompt_tokens": 3}, b"012"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, b"789"),
        ({"truncate_prompt_tokens": -1}, b"0123456789"),
        ({"truncate_prompt_tokens": 64}, b"0123456789"),
    ],
)
async def test_texts_are_cut_if_asked(client, engine, fields, tokens):
    await embed(client, {"input": "0123456789", **fields})
    await embed(client, {"input": list(b"0123456789"), **fields})
    assert [request.prompts for request in engine.requests] == [(tuple(tokens),)] * 2


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", None),
        ({"input": ""}, "input", None),
        ({"input": []}, "input", None),
        ({"input": ["a", [1]]}, "input", None),
        ({"input": ["a"] * 2049}, "input", None),
        ({"input": [300]}, "input", None),
        ({"input": [5] * 65}, "input", "context_length_exceeded"),
        ({"input": ["a", "x" * 65]}, None, "context_length_exceeded"),
        ({"encoding_format": "int8"}, "encoding_format", None),
        ({"dimensions": 0}, "dimensions", None),
        ({"dimensions": 5}, "dimensions", None),
        ({"pooling": "cls"}, "pooling", None),
        ({"embed_dtype": "float16"}, "embed_dtype", None),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", None),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", None),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens", None),
        ({"truncation_side": "middle"}, "truncation_side", None),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages", None),
    ],
)
async def test_a_bad_field_is_named(client, fields, param, code):
    await refusal(client.post(URL, json={"input": "a", **fields}), 400, param=param, code=code)


@pytest.mark.parametrize("form", ["float", "base64", None])
async def test_the_openai_client(serving, form):
    """By default it asks for base64, and decodes it."""
    async with (
        serving() as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        options = {} if form is None else {"encoding_format": form}
        answer = await client.embeddings.create(model=MODEL, input=["ab", "c"], **options)
        for item, text in zip(answer.data, ["ab", "c"], strict=True):
            vector = np.frombuffer(base64.b64decode(item.embedding), "<f4") if form == "base64" else item.embedding
            assert list(vector) == pytest.approx(list(of(text)), abs=1e-6)
        assert answer.usage.prompt_tokens == 3


def many(number):
    return [[place % 200 + 1] * (place % 5 + 1) for place in range(number)]


async def test_the_engine_gets_many_texts_in_parts(client, engine):
    """Each part is a request of its own there, so others come in between."""
    texts = many(300)
    answer = await embed(client, {"input": texts})
    assert [len(request.prompts) for request in engine.requests] == [128, 128, 44]
    assert [item["index"] for item in answer["data"]] == list(range(300))
    for item, text in zip(answer["data"], texts, strict=True):
        assert item["embedding"] == pytest.approx(of(text), abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
    text = (await client.get("/metrics")).text
    assert 'mlx_parallm_request_success_total{finished_reason="stop",model_name="tiny/byte-model"} 300.0' in text


async def test_too_many_tokens_together_are_refused(client, engine, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_POOLED_TOKENS", 1)  # 128 texts as long as the context are allowed all the same
    await refusal(client.post(URL, json={"input": [[1] * 64] * 129}), 400, param="input")
    assert not engine.requests
    await embed(client, {"input": [[1] * 64] * 128})


async def test_a_part_that_fails_fails_the_request(client, engine):
    engine.fail_before, engine.error = 100, StepFailedError("oops")
    await refusal(client.post(URL, json={"input": many(300)}), 500, code="step_failed")
    assert len(engine.requests) == 1
