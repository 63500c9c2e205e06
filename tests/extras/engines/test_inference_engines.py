"""The outside inference engines: what each kind of server is asked, and which servers and answers are refused.

test_transcripts.py replays vLLM, SGLang and MAX; test_split_mode.py runs against real servers.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from extras.engines.engine_rig import EOS, VERSION, answered, make
from extras.engines.engine_server import answers_of, scene, serving

from mlx_parallm.errors import ConfigError, EngineError

COMPLETION = json.loads(scene("vllm")[2]["answer"])


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
    before = answers_of(scene("vllm")[:2])
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
    before = answers_of(scene("vllm")[:2])
    with serving([*before, ("POST /v1/completions", 200, eight_tokens())]) as server:
        made = make("vllm", server.url, tmp_path, lambda token: own)
        if accepted:
            await made.engine.open(VERSION)
        else:
            with pytest.raises(ConfigError, match="serve the same base model"):
                await made.engine.open(VERSION)
        await made.engine.close()


async def test_a_server_that_is_not_there_is_said_to_be_unreachable(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("mlx_parallm.extras.engines.http._PAUSES_S", (0.01,))
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
