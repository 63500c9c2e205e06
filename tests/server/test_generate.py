"""`/generate` in the three forms of vLLM, SGLang and TRL."""

import pytest
from server.asking import answered, fault
from server.fakes import EOS

from mlx_parallm.core.requests import TokenLogprob

H, I = b"Hi"  # noqa: E741
VLLM = {"prompt": {"prompt_token_ids": [97, 98]}, "logprobs": 0}
SGLANG = {"input_ids": [97, 98], "return_logprob": True, "return_text_in_logprobs": False}
TRL = {"prompts": ["ab"]}


@pytest.fixture(autouse=True)
def hi(engine):
    engine.text = "Hi"


async def generate(client, body, path="/generate", headers=None):
    return await answered(client, path, body, headers=headers)


# ---- vLLM --------------------------------------------------------------------------------------------


async def test_vllm(client, engine):
    """As atroposlib's `VLLMServer` asks and reads."""
    body = {**VLLM, "n": 2, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "stop": ["x"]}
    assert await generate(client, body) == {
        "text": ["Hi", "Hi"],
        "prompt": "ab",
        "finish_reasons": ["stop", "stop"],
        "token_ids": [[H, I], [H, I]],
        "prompt_token_ids": [97, 98],
        "logprobs": [[[{str(H): -0.5}], [{str(I): -0.5}]]] * 2,
    }
    (request,) = engine.requests
    assert (request.prompts, request.n, request.stopping.max_tokens) == (((97, 98),), 2, 5)
    assert (request.sampling.temperature, request.sampling.top_p, request.stopping.stop) == (0.5, 0.9, ("x",))
    assert not request.sampling.processed_logprobs


async def test_the_drawn_token_comes_first_whatever_the_most_likely_ones_are(client, engine, monkeypatch):
    scored = TokenLogprob(H, -3.0, ((1, -0.1), (2, -0.2)))
    monkeypatch.setattr("server.fakes.logprob_of", lambda *_, **__: scored)
    first = (await generate(client, {**VLLM, "logprobs": 2, "max_tokens": 1}))["logprobs"][0][0][0]
    assert list(first) == [str(H), "1", "2"]


async def test_vllm_scores_prompts(client, engine):
    """As atroposlib's `get_logprobs` asks and reads."""
    body = {"prompt": {"prompt_token_ids": [97, 98]}, "prompt_logprobs": 2, "n": 1, "temperature": 0.0, "top_p": 1.0}
    got = await generate(client, {**body, "max_tokens": 1})
    assert got["prompt_logprobs"] == [None, {"98": -0.5, "99": -1.5}]
    assert "logprobs" not in got


# ---- SGLang ------------------------------------------------------------------------------------------


async def test_sglang(client, engine):
    """As atroposlib's `SGLangServer` asks and reads."""
    body = {**SGLANG, "sampling_params": {"n": 2, "max_new_tokens": 5, "temperature": 0.5, "stop": ["x"]}}
    answers = await generate(client, body)
    assert [answer["text"] for answer in answers] == ["Hi", "Hi"]
    meta = answers[1]["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, H, None], [-0.5, I, None]]
    assert meta["finish_reason"] == {"type": "stop", "matched": I}
    assert (meta["prompt_tokens"], meta["completion_tokens"], answers[1]["output_ids"]) == (2, 2, [H, I])
    (request,) = engine.requests
    assert (request.n, request.stopping.max_tokens, request.sampling.temperature) == (2, 5, 0.5)
    assert request.sampling.processed_logprobs, "SGLang's logprobs are those after temperature"


async def test_one_answer_is_an_object(client, engine):
    body = {**SGLANG, "rid": "mine", "sampling_params": {"max_new_tokens": 1}}
    answer = await generate(client, {**body, "logprob_start_len": -1, "top_logprobs_num": 0})
    assert answer["text"] == "H"
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    assert "output_token_logprobs" not in (await generate(client, {"input_ids": [97]}))["meta_info"]
    assert engine.requests[-1].stopping.max_tokens == 63, "128, but no more than fit"


async def test_sglangs_names_of_sampling_fields(client, engine):
    sampling = {"min_new_tokens": 1, "sampling_seed": 4, "stop_token_ids": [EOS]}
    await generate(client, {**SGLANG, "sampling_params": sampling})
    (request,) = engine.requests
    assert (request.stopping.min_tokens, request.stopping.stop_token_ids, request.sampling.seed) == (1, (EOS,), 4)


# ---- TRL ---------------------------------------------------------------------------------------------


async def test_trl(client, engine):
    """As atroposlib's `TrlVllmServer` asks and reads, with a slash at the end of the path."""
    options = {"repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 9}
    got = await generate(client, {"prompts": ["ab", "c"], "n": 2, **options}, path="/generate/")
    assert got == {
        "prompt_ids": [[97, 98], [99]],
        "completion_ids": [[H, I]] * 4,
        "logprobs": [[-0.5, -0.5]] * 4,
    }


# ---- all forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [VLLM, SGLANG, TRL], ids=["vLLM", "SGLang", "TRL"])
async def test_every_form_is_collected_if_a_header_says_so(client, training, body):
    got = await generate(client, body, headers={"X-Group-Id": "g"})
    assert [request.collection.group_id for request in training.collected] == ["g"]
    said = got["meta_info"]["trajectory_id"] if body is SGLANG else got["trajectory_ids"][0]
    assert said == "traj-0"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"text": "a"}, "text"),
        ({**VLLM, "prompts": ["a"]}, "prompts"),
        ({"prompt": "a"}, "prompt"),
        ({"prompt": {"prompt_token_ids": []}}, "prompt.prompt_token_ids"),
        ({"prompt": {"prompt_token_ids": [999]}}, "prompt.prompt_token_ids"),
        ({"prompt": {"prompt_token_ids": [97], "multi_modal_data": {"image": "x"}}}, "prompt.multi_modal_data"),
        ({**VLLM, "sampling_params": {"temperature": 0}}, "sampling_params"),
        ({**VLLM, "stream": True}, "stream"),
        ({**VLLM, "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"input_ids": [97], "temperature": 0.5}, "temperature"),
        ({"input_ids": [97], "sampling_params": {"temperature": 9}}, "sampling_params.temperature"),
        ({"input_ids": [97], "sampling_params": {"max_new_tokens": 2**31}}, "sampling_params.max_new_tokens"),
        ({"input_ids": [97], "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
        ({"input_ids": [[97]]}, "input_ids"),
        ({**SGLANG, "lora_path": "math"}, "lora_path"),
        ({**SGLANG, "logprob_start_len": 0}, "logprob_start_len"),
        ({**TRL, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({**SGLANG, "top_logprobs_num": 1}, "top_logprobs_num"),
        ({**SGLANG, "return_text_in_logprobs": True}, "return_text_in_logprobs"),
        ({"input_ids": [999]}, "input_ids"),
        ({"prompts": []}, "prompts"),
        ({"prompts": ["x" * 65]}, None),
    ],
    ids=str,
)
async def test_what_is_refused_is_named_as_the_form_names_it(client, engine, body, param):
    response = await client.post("/generate", json=body)
    assert response.status_code == 400, response.text
    assert fault(response)["param"] == param
    assert not engine.requests
