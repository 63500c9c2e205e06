"""Fields of vLLM that completions and chat share: what reaches the engine, and what comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from server.asking import answered, refusal
from server.fakes import CARD, EOS, VOCAB, ByteTokenizer
from server.one_model import OneModel

from mlx_parallm.core.requests import SamplingParams
from mlx_parallm.server.api.conversation import read_templates

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


async def sent(client, engine, path=COMPLETIONS, **fields):
    """The engine's request for these fields."""
    await answered(client, path, {"prompt": "x", **fields} if path == COMPLETIONS else fields)
    return engine.requests[-1]


async def refused(client, path=COMPLETIONS, **fields):
    return await refusal(client.post(path, json={"prompt": "x", **fields} if path == COMPLETIONS else fields), 400)


def allowed(mask):
    return {i for i in range(VOCAB) if mask[i // 8] >> i % 8 & 1}


async def test_allowed_tokens_are_a_mask(client, engine):
    assert allowed((await sent(client, engine, allowed_token_ids=[0, 9, EOS])).sampling.allowed_tokens) == {0, 9, EOS}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [99], "bad_words": ["c"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [99], "guided_choice": ["a"]}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": ["a"], "collect_trajectory": True}, "bad_words"),
        ({"allowed_token_ids": [99], "collect_trajectory": True}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1, "echo": True}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_cannot_be_honoured_is_refused_by_name(client, engine, fields, param):
    assert (await refused(client, **fields))["param"] == param
    assert not engine.requests


async def test_the_client_may_choose_the_id_of_the_answer(client):
    body = {"messages": USER, "request_id": "mine"}
    by_field = await client.post(CHAT, json=body)
    assert (by_field.json()["id"], by_field.headers["x-request-id"]) == ("chatcmpl-mine", "mine")
    by_header = await client.post(CHAT, json=body, headers={"x-request-id": "theirs"})
    assert (by_header.json()["id"], by_header.headers["x-request-id"]) == ("chatcmpl-theirs", "theirs")


# ---- templates ---------------------------------------------------------------------------------------


async def test_the_last_message_is_continued(client, engine):
    turns = [*USER, {"role": "assistant", "content": "I am"}]
    fields = {"messages": turns, "add_generation_prompt": False, "continue_final_message": True}
    assert bytes((await sent(client, engine, CHAT, **fields)).prompts[0]).decode() == "u:hi\na:I am"
    counted = await client.post("/tokenize", json=fields)
    assert bytes(counted.json()["tokens"]).decode() == "u:hi\na:I am"


async def test_templates_of_the_operator_are_chosen_by_name_or_text(tmp_path, make_client, engine):
    (tmp_path / "short.jinja").write_text("T1")
    client = make_client()
    state = client.app.state
    state.services = replace(state.services, models=OneModel(ByteTokenizer(), CARD, read_templates(tmp_path)))
    for asked in ("short", "T1"):
        request = await sent(client, engine, CHAT, messages=USER, chat_template=asked)
        assert bytes(request.prompts[0]).decode() == "T1\nu:hi\na:"
    error = await refused(client, CHAT, messages=USER, chat_template="{{ 1 }}")
    assert (error["param"], "short" in error["message"]) == ("chat_template", True)


# ---- the model's own defaults ------------------------------------------------------------------------

DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 7}


@pytest.fixture
def make_client_of(make_client):
    """`make_client` for a model that has defaults of its own."""

    def make(**settings):
        client = make_client(**settings)
        state = client.app.state
        card = replace(CARD, generation_defaults=DEFAULTS)
        state.services = replace(state.services, models=OneModel(ByteTokenizer(), card))
        return client

    return make


async def test_the_models_defaults_count_for_what_is_left_out(make_client_of, engine):
    client = make_client_of()
    drawn = (await sent(client, engine, CHAT, messages=USER, seed=1)).sampling
    wanted = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, seed=1)
    assert drawn == wanted
    assert engine.requests[-1].stopping.max_tokens == 7
    given = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": -1, "seed": 1}
    request = await sent(client, engine, CHAT, messages=USER, **given)
    assert request.sampling == SamplingParams(temperature=0.9, seed=1)
    assert request.stopping.max_tokens == 64 - len("u:hi\na:")
    nulls = dict.fromkeys(("temperature", "top_k", "top_p", "repetition_penalty", "max_tokens"))
    assert (await sent(client, engine, CHAT, messages=USER, seed=1, **nulls)).sampling == wanted
    assert (await sent(client, engine)).stopping.max_tokens == 16
    info = (await client.get("/server_info")).json()
    assert info["model"]["generation_defaults"] == DEFAULTS


@pytest.mark.parametrize("name", ["none", "vllm"])
async def test_the_models_defaults_can_be_turned_off(make_client_of, engine, name):
    client = make_client_of(generation_config=name)
    assert (await sent(client, engine, CHAT, messages=USER, seed=1)).sampling == SamplingParams(seed=1)
    assert (await client.get("/server_info")).json()["model"]["generation_defaults"] == {}


async def test_trajectories_and_token_routes_are_drawn_from_the_models_own_distribution(make_client_of, engine):
    client = make_client_of()
    await sent(client, engine, CHAT, messages=USER, seed=1, collect_trajectory=True)
    body = {"token_ids": [1, 2], "sampling_params": {"seed": 1}}
    assert (await client.post("/inference/v1/generate", json=body)).status_code == 200
    assert (await client.post("/generate", json={"prompt": {"prompt_token_ids": [1]}, "seed": 1})).status_code == 200
    for request in engine.requests:
        assert request.sampling == SamplingParams(seed=1)
