"""`/generate` in the three forms of vLLM, SGLang and TRL."""

import pytest
from server.asking import answered, refusal

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


async def test_the_drawn_token_comes_first_whatever_the_most_likely_ones_are(client, engine, monkeypatch):
    scored = TokenLogprob(H, -3.0, ((1, -0.1), (2, -0.2)))
    monkeypatch.setattr("server.fakes.logprob_of", lambda *_, **__: scored)
    first = (await generate(client, {**VLLM, "logprobs": 2, "max_tokens": 1}))["logprobs"][0][0][0]
    assert list(first) == [str(H), "1", "2"]


# ---- SGLang ------------------------------------------------------------------------------------------


# ---- TRL ---------------------------------------------------------------------------------------------


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
    await refusal(client.post("/generate", json=body), 400, param=param)
    assert not engine.requests
