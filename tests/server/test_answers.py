"""What the engine is asked for a request, and what is answered: one row of a table each, for the APIs that complete."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
from server.asking import answered
from server.fakes import EOS

from mlx_parallm.core.requests import SamplingParams, StopParams

COMPLETIONS, CHAT, GENERATE, TOKENS = "/v1/completions", "/v1/chat/completions", "/generate", "/inference/v1/generate"
RESPONSES, MESSAGES, OLLAMA, EMBEDDINGS = "/v1/responses", "/v1/messages", "/api/chat", "/v1/embeddings"
H, I = b"Hi"  # noqa: E741
USER = [{"role": "user", "content": "hi"}]
VLLM = {"prompt": {"prompt_token_ids": [97, 98]}, "logprobs": 0}
SGLANG = {"input_ids": [97, 98], "return_logprob": True, "return_text_in_logprobs": False}
EVERY_OPTION = {
    **{
        "n": 2,
        "max_tokens": 7,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -1,
    },
    **{"stop": ["a", "b"], "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.2},
    **{"logit_bias": {"5": -100, "3": 2.5}, "logprobs": 2, "ignore_eos": True, "priority": -3},
}
BIASES = ((3, 2.5), (5, -100.0))
HALF = {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}
SENT_BY_RENDERERS = {
    "model": "base",
    "token_ids": [1, 97, 98],
    "sampling_params": {
        **{"temperature": 0.7, "max_tokens": 2, "stop_token_ids": [EOS], "logprobs": 1, "skip_special_tokens": False},
        "routed_experts_prompt_start": 2,
    },
}
"""As `renderers.client.generate` sends it, of verifiers 0.4.0."""
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], Any]] = {
    "every option": (
        *(COMPLETIONS, {"prompt": "ab", **EVERY_OPTION}, "Hi"),
        {
            "sampling": SamplingParams(0.5, 40, 0.9, 0.1, 2**64 - 1, 1.0, -1.0, 1.2, BIASES, top_logprobs=2),
            "stopping": StopParams(7, 3, ("a", "b"), ignore_eos=True),
            **{"prompts": ((97, 98),), "n": 2, "priority": -3, "prompt_logprobs": None},
        },
        {},
    ),
    "a prompt of text": (COMPLETIONS, {"prompt": "ä"}, "Hi", {"prompts": ((195, 164),)}, {"choices": [{"index": 0}]}),
    "prompts of text": (
        *(COMPLETIONS, {"prompt": ["a", "b"]}, "Hi", {"prompts": ((97,), (98,))}),
        {"choices": [{"index": 0}, {"index": 1}]},
    ),
    "a prompt of tokens": (COMPLETIONS, {"prompt": [7, 8]}, "Hi", {"prompts": ((7, 8),)}, {}),
    "prompts of tokens": (COMPLETIONS, {"prompt": [[7], [8, 9]]}, "Hi", {"prompts": ((7,), (8, 9))}, {}),
    "lm_eval scores, and reads as many tokens as it sent, then one": (
        COMPLETIONS,
        {"prompt": [[104, 105], [106]], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234},
        "Hi",
        {"prompt_logprobs": 1},
        {
            "choices": [
                {
                    "text": "hiH",
                    "logprobs": {
                        "tokens": ["h", "i", "H"],
                        "token_logprobs": [None, -0.5, -0.5],
                        "top_logprobs": [None, {"i": -0.5}, {"H": -0.5}],
                        "text_offset": [0, 1, 2],
                        "token_ids": [104, 105, H],
                    },
                },
                {"logprobs": {"tokens": ["j", "H"]}},
            ]
        },
    ),
    "max_tokens 0 scores and generates nothing": (
        *(COMPLETIONS, {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}, "Hi", {}),
        {
            "choices": [
                {"text": "abc", "finish_reason": "length", "logprobs": {"token_logprobs": [None, -0.5, -0.5]}},
            ],
            "usage": {"completion_tokens": 0},
        },
    ),
    "text offsets follow characters": (
        *(COMPLETIONS, {"prompt": "é", "echo": True, "logprobs": 0}, "ä!", {}),
        {"choices": [{"logprobs": {"tokens": ["\ufffd"] * 4 + ["!"], "text_offset": [0, 0, 1, 1, 2]}}]},
    ),
    "logprobs of the prompt, and ids": (
        COMPLETIONS,
        {"prompt": ["ab", "c"], "max_tokens": 1, "prompt_logprobs": 2, "return_token_ids": True},
        *("Hi", {}),
        {
            "choices": [
                {
                    "prompt_logprobs": [
                        None,
                        {
                            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
                            "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
                        },
                    ],
                    **{"prompt_token_ids": [97, 98], "token_ids": [72], "logprobs": None},
                },
                {"prompt_logprobs": [None]},
            ]
        },
    ),
    "the developer is the system": (
        *(CHAT, {"messages": [{"role": "developer", "content": "d"}, *USER]}, "Hi", {"text": "s:d\nu:hi\na:"}, {}),
    ),
    "parts of a message": (
        *(CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}]}),
        *("Hi", {"text": "u:a\nb\na:"}, {}),
    ),
    "an empty answer": (
        *(CHAT, {"messages": [*USER, {"role": "assistant"}, *USER]}, "Hi", {"text": "u:hi\na:\nu:hi\na:"}, {}),
    ),
    "a refusal": (
        *(CHAT, {"messages": [*USER, {"role": "assistant", "content": None, "refusal": "no"}, *USER]}),
        *("Hi", {"text": "u:hi\na:no\nu:hi\na:"}, {}),
    ),
    "a refusal in parts": (
        *(CHAT, {"messages": [*USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]}),
        *("Hi", {"text": "u:hi\na:no\na:"}, {}),
    ),
    "a result without an id": (
        *(CHAT, {"messages": [{"role": "tool", "content": "4", "tool_call_id": ""}]}, "Hi", {"text": "t:4\na:"}, {}),
    ),
    "options of the template": (
        CHAT,
        {"messages": USER, "add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False}},
        *("Hi", {"text": "u:hi\nenable_thinking=False\n"}, {}),
    ),
    "max_tokens and its newer name": (
        *(CHAT, {"messages": USER, "max_tokens": 2, "max_completion_tokens": 2}, "Hi there", {}),
        {"choices": [{"message": {"content": "Hi"}, "finish_reason": "length"}]},
    ),
    "logprobs have exact bytes": (
        *(CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 1}, "ä", {}),
        {"choices": [{"logprobs": {"content": [{**HALF, "top_logprobs": [HALF]}, {"bytes": [0xA4]}]}}]},
    ),
    "ids and logprobs of a prompt are at vLLM's places": (
        CHAT,
        {"messages": USER, "n": 2, "max_tokens": 1, "return_token_ids": True, "prompt_logprobs": 0},
        *("Hi", {}),
        {
            "prompt_token_ids": [*b"u:hi\na:"],
            "choices": [{"token_ids": [72]}, {"token_ids": [72]}],
            "prompt_logprobs": [None, {"58": {"logprob": -0.5, "rank": 1, "decoded_token": ":"}}, *[{}] * 5],
        },
    ),
    "logprobs of tokens that were sent": (
        TOKENS,
        {"token_ids": [97, 98], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}},
        *("Hi", {}),
        {"prompt_logprobs": [None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]},
    ),
    "vLLM, as atroposlib's VLLMServer asks and reads": (
        GENERATE,
        {**VLLM, "n": 2, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "stop": ["x"]},
        "Hi",
        {
            **{"prompts": ((97, 98),), "n": 2, "stopping.max_tokens": 5, "stopping.stop": ("x",)},
            **{"sampling.temperature": 0.5, "sampling.top_p": 0.9, "sampling.processed_logprobs": False},
        },
        {
            "text": ["Hi", "Hi"],
            "prompt": "ab",
            "finish_reasons": ["stop", "stop"],
            "token_ids": [[H, I], [H, I]],
            "prompt_token_ids": [97, 98],
            "logprobs": [[[{str(H): -0.5}], [{str(I): -0.5}]]] * 2,
        },
    ),
    "vLLM scores prompts, as atroposlib's get_logprobs asks and reads": (
        GENERATE,
        {"prompt": VLLM["prompt"], "prompt_logprobs": 2, "n": 1, "temperature": 0.0, "top_p": 1.0, "max_tokens": 1},
        *("Hi", {}),
        {"prompt_logprobs": [None, {"98": -0.5, "99": -1.5}]},
    ),
    "SGLang, as atroposlib's SGLangServer asks and reads; its logprobs are those after temperature": (
        GENERATE,
        {**SGLANG, "sampling_params": {"n": 2, "max_new_tokens": 5, "temperature": 0.5, "stop": ["x"]}},
        "Hi",
        {"n": 2, "stopping.max_tokens": 5, "sampling.temperature": 0.5, "sampling.processed_logprobs": True},
        [
            {
                "text": "Hi",
                "output_ids": [H, I],
                "meta_info": {
                    "output_token_logprobs": [[-0.5, H, None], [-0.5, I, None]],
                    "finish_reason": {"type": "stop", "matched": I},
                    **{"prompt_tokens": 2, "completion_tokens": 2},
                },
            }
        ]
        * 2,
    ),
    "one answer of SGLang is an object": (
        GENERATE,
        {
            **SGLANG,
            "rid": "mine",
            "sampling_params": {"max_new_tokens": 1},
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
        },
        *("Hi", {}),
        {"text": "H", "meta_info": {"finish_reason": {"type": "length", "length": 1}}},
    ),
    "SGLang's names": (
        GENERATE,
        {**SGLANG, "sampling_params": {"min_new_tokens": 1, "sampling_seed": 4, "stop_token_ids": [EOS]}},
        *("Hi", {"stopping.min_tokens": 1, "stopping.stop_token_ids": (EOS,), "sampling.seed": 4}, {}),
    ),
    "TRL, as atroposlib's TrlVllmServer asks and reads": (
        "/generate/",
        {"prompts": ["ab", "c"], "n": 2, "repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 9},
        *("Hi", {}),
        {"prompt_ids": [[97, 98], [99]], "completion_ids": [[H, I]] * 4, "logprobs": [[-0.5, -0.5]] * 4},
    ),
    "the client of renderers": (
        *(TOKENS, SENT_BY_RENDERERS, "Hi"),
        {
            **{"prompts": ((1, 97, 98),), "stopping.max_tokens": 2, "stopping.stop_token_ids": (EOS,)},
            **{"sampling.temperature": 0.7, "sampling.top_logprobs": 1, "visible_specials": {256, EOS}},
        },
        {
            "prompt_logprobs": None,
            "choices": [
                {
                    **{"index": 0, "token_ids": [H, I], "finish_reason": "stop"},
                    "logprobs": {"content": [{"token": f"token_id:{each}", "logprob": -0.5} for each in (H, I)]},
                }
            ],
        },
    ),
    "what a body of tokens says": (
        TOKENS,
        {
            **{"token_ids": [97, 98], "request_id": "mine", "cache_salt": "s", "priority": 3, "return_token_ids": True},
            "sampling_params": {"n": 2, "seed": 5},
        },
        *("Hi", {"cache_salt": "s", "priority": 3, "n": 2, "sampling.seed": 5}),
        {
            **{"request_id": "mine", "prompt_token_ids": [97, 98], "usage": {"completion_tokens": 4}},
            "choices": [{"logprobs": None}] * 2,
        },
    ),
    "a Response": (
        RESPONSES,
        {
            **{"input": "hi", "temperature": 0.5, "top_p": 0.9, "seed": 7, "max_output_tokens": 20},
            "chat_template_kwargs": {"enable_thinking": False},
        },
        "Hi",
        {
            **{
                "sampling.temperature": 0.5,
                "sampling.top_p": 0.9,
                "sampling.seed": 7,
                "stopping.max_tokens": 20,
                "n": 1,
            },
            "text": "u:hi\nenable_thinking=False\na:",
        },
        {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 20},
    ),
    "instructions of a Response": (
        *(RESPONSES, {"input": "hi", "instructions": "be kind"}, "Hi", {"text": "s:be kind\nu:hi\na:"}, {}),
    ),
    "items of a Response": (
        RESPONSES,
        {
            "input": [
                {"role": "developer", "content": "d"},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
                {
                    **{"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"},
                    "content": [
                        {"type": "output_text", "text": "a", "annotations": [], "logprobs": []},
                        {"type": "output_text", "text": "b", "annotations": []},
                    ],
                },
                {"role": "user", "content": "r"},
            ]
        },
        *("Hi", {"text": "s:d\nu:q\na:a\nb\nu:r\na:"}, {}),
    ),
    "a Response that was cut off": (
        *(RESPONSES, {"input": "hi", "max_output_tokens": 2}, "Hi there", {}),
        {
            **{"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            "output": [{"status": "incomplete", "content": [{"text": "Hi"}]}],
        },
    ),
    "a message": (
        MESSAGES,
        {
            **{"messages": USER, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 9},
            "stop_sequences": ["\n\nHuman:"],
        },
        "Hi",
        {
            **{"sampling.temperature": 0.5, "sampling.top_p": 0.9, "sampling.top_k": 7, "stopping.max_tokens": 9},
            "stopping.stop": ("\n\nHuman:",),
        },
        {"stop_reason": "end_turn"},
    ),
    "options of Ollama": (
        OLLAMA,
        {
            **{"model": "base", "messages": USER, "stream": False},
            "options": {
                **{"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.1, "seed": 3},
                **{"presence_penalty": 0.2, "frequency_penalty": 0.3, "num_predict": 5, "stop": ["\n\n"]},
            },
        },
        "Hi",
        {
            "sampling": SamplingParams(0.5, 7, 0.9, 0.1, 3, 0.2, 0.3, 1.1),
            **{"stopping.max_tokens": 5, "stopping.stop": ("\n\n",)},
        },
        {"done_reason": "stop"},
    ),
    "logprobs of Ollama": (
        *(OLLAMA, {"model": "base", "messages": USER, "stream": False, "logprobs": True, "top_logprobs": 1}, "ä", {}),
        {"logprobs": [{**HALF, "top_logprobs": [HALF]}, {"bytes": [0xA4]}]},
    ),
    "an embedding of text": (EMBEDDINGS, {"input": "ab"}, "", {"prompts": ((97, 98),)}, {}),
    "embeddings of texts": (EMBEDDINGS, {"input": ["a", "b"]}, "", {"prompts": ((97,), (98,))}, {}),
    "an embedding of tokens": (EMBEDDINGS, {"input": [1, 2]}, "", {"prompts": ((1, 2),)}, {}),
    "embeddings of tokens": (EMBEDDINGS, {"input": [[1, 2], [3]]}, "", {"prompts": ((1, 2), (3,))}, {}),
    "words that are banned with and without a space": (
        *(COMPLETIONS, {"prompt": "x", "bad_words": ["ab", " c"]}, "Hi"),
        *({"sampling.bad_words": ((97, 98), (32, 97, 98), (99,), (32, 99))}, {}),
    ),
    "a prompt that is cut at its beginning": (
        *(COMPLETIONS, {"prompt": "abcdefghij", "truncate_prompt_tokens": 3}, "Hi", {"text": "hij"}, {}),
    ),
    "a prompt that is cut at its end": (
        COMPLETIONS,
        {"prompt": "abcdefghij", "truncate_prompt_tokens": 3, "truncation_side": "right"},
        *("Hi", {"text": "abc"}, {}),
    ),
    "a prompt that is cut to what fits": (
        COMPLETIONS,
        {"prompt": "abcdefghij", "truncate_prompt_tokens": -1, "max_tokens": 60},
        *("Hi", {"text": "ghij"}, {}),
    ),
    "a prompt that needs no cut": (
        *(COMPLETIONS, {"prompt": "abcdefghij", "truncate_prompt_tokens": 20}, "Hi", {"text": "abcdefghij"}, {}),
    ),
    "no limit of completions": (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "Hi", {"stopping.max_tokens": 63}, {}),
    "null as no limit": (COMPLETIONS, {"prompt": "x", "max_tokens": None}, "Hi", {"stopping.max_tokens": 63}, {}),
    "the limit of completions": (COMPLETIONS, {"prompt": "x"}, "Hi", {"stopping.max_tokens": 16}, {}),
    "no limit of chat": (CHAT, {"messages": USER, "max_tokens": -1}, "Hi", {"stopping.max_tokens": 57}, {}),
    "no limit of chat by the newer name": (
        *(CHAT, {"messages": USER, "max_completion_tokens": -1, "max_tokens": None}, "Hi"),
        *({"stopping.max_tokens": 57}, {}),
    ),
    "a limit of chat by the newer name": (
        *(CHAT, {"messages": USER, "max_tokens": -1, "max_completion_tokens": 5}, "Hi"),
        *({"stopping.max_tokens": 5}, {}),
    ),
    "no limit of a Response": (
        *(RESPONSES, {"input": "hi", "max_output_tokens": -1}, "Hi", {"stopping.max_tokens": 57}, {}),
    ),
    "null as no limit of a Response": (
        *(RESPONSES, {"input": "hi", "max_output_tokens": None}, "Hi", {"stopping.max_tokens": 57}, {}),
    ),
}
"""By what is shown: the path, the body, what the engine says, what it was asked, and parts of the answer."""


@pytest.mark.parametrize(("path", "body", "text", "asked", "said"), CASES.values(), ids=CASES)
async def test_what_is_asked_and_answered(client, engine, path, body, text, asked, said):
    engine.text = text
    answer = await answered(client, path, body)
    (request,) = engine.requests
    found = {name: engine.prompt_text if name == "text" else attrgetter(name)(request) for name in asked}
    assert (found, part_of(answer, said)) == (asked, said)


def part_of(answer: Any, said: Any) -> Any:
    """What an answer has at the places that `said` names."""
    if isinstance(said, dict) and isinstance(answer, dict):
        return {name: part_of(answer.get(name, "missing"), said[name]) for name in said}
    if isinstance(said, list) and isinstance(answer, list) and len(said) == len(answer):
        return [part_of(one, other) for one, other in zip(answer, said, strict=True)]
    return answer
