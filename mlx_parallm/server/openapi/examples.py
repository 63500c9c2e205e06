"""Example bodies, by path and name. Each can be sent unchanged to a server that trains and has an adapter `math`; those
with a trajectory id or a folder need one of that name, and `/v1/training/stop` an adapter in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Examples = Mapping[str, Mapping[str, Any]]

_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
_SCORE: Examples = {"two endings": {"text_1": "The sky is", "text_2": [" blue.", " loud."]}}
_RERANK: Examples = {"the best of two": {"query": "Is it wet?", "documents": ["It rains.", "It snows."], "top_n": 1}}
_LOAD: Examples = {"from a folder": {"lora_name": "tone", "lora_path": "tone"}}
_UNLOAD: Examples = {"all versions": {"lora_name": "math"}}
_CONTROL: Examples = {"default adapter": {}}
_SWITCH: Examples = {"one version": {"version": "math@1"}, "the model itself": {"version": "base"}}
_CHECKPOINT: Examples = {"tagged": {"lora_name": "math", "checkpoint_name": "mine", "metrics": {"accuracy": 0.75}}}

EXAMPLES: Mapping[str, Examples] = {
    "/v1/completions": {
        "continue a text": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
        "score a text": {"prompt": "Paris", "max_tokens": 0, "echo": True, "logprobs": 1},
        "several samples": {"prompt": "Once", "n": 2, "max_tokens": 4, "temperature": 0.8, "seed": 7},
        "token ids in and out": {
            "prompt": [1, 2, 3],
            "max_tokens": 4,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        },
    },
    "/v1/chat/completions": {
        "a question": {"messages": _MESSAGES, "max_tokens": 8},
        "as a stream": {
            "messages": _MESSAGES,
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "for training": {"messages": _MESSAGES, "n": 2, "max_tokens": 4, "collect_trajectory": True},
    },
    "/v1/chat/completions/tokens": {
        "a question and its tokens": {"messages": _MESSAGES, "tokens": [1, 2, 3], "max_tokens": 4}
    },
    "/v1/chat/completions/render": {"a question": {"messages": _MESSAGES, "max_tokens": 4, "logprobs": True}},
    "/inference/v1/generate": {
        "token ids": {
            "token_ids": [1, 2, 3],
            "sampling_params": {"max_tokens": 4, "logprobs": 1, "stop_token_ids": [2]},
        },
        "score tokens": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}},
    },
    "/generate": {
        "vLLM": {"prompt": {"prompt_token_ids": [1, 2, 3]}, "max_tokens": 4, "logprobs": 0, "n": 2},
        "SGLang": {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "n": 2}, "return_logprob": True},
        "TRL": {"prompts": ["Once"], "max_tokens": 4, "n": 2},
    },
    "/v1/responses": {
        "a question": {"input": "What is the capital of France?", "max_output_tokens": 8},
        "items": {"input": _MESSAGES, "instructions": "Be brief.", "max_output_tokens": 8, "store": False},
        "as a stream": {"input": "Hello", "max_output_tokens": 8, "stream": True},
    },
    "/v1/responses/input_tokens": {"a question": {"input": "What is the capital of France?"}},
    "/v1/messages": {
        "a question": {"messages": _MESSAGES, "system": "Be brief.", "max_tokens": 8},
        "as a stream": {"messages": _MESSAGES, "max_tokens": 8, "stream": True},
    },
    "/v1/messages/count_tokens": {"a question": {"messages": _MESSAGES}},
    "/api/chat": {
        "a question": {"model": "base", "messages": _MESSAGES, "options": {"num_predict": 8}},
        "in one piece": {"model": "base", "messages": _MESSAGES, "stream": False, "options": {"num_predict": 8}},
        "load": {"model": "base"},
    },
    "/api/generate": {
        "a question": {"model": "base", "prompt": "Hello", "options": {"num_predict": 8}},
        "continue a text": {"model": "base", "prompt": "Once", "raw": True, "stream": False},
    },
    "/api/embed": {"two texts": {"model": "base", "input": ["A cat sleeps.", "A dog runs."]}},
    "/api/embeddings": {"a text": {"model": "base", "prompt": "A cat sleeps."}},
    "/api/show": {"an adapter": {"model": "math"}},
    "/v1/embeddings": {
        "two texts": {"input": ["A cat sleeps.", "A dog runs."]},
        "token ids, as base64": {"input": [1, 2, 3], "encoding_format": "base64", "pooling": "mean", "dimensions": 2},
    },
    "/v1/score": _SCORE,
    "/score": _SCORE,
    "/v1/rerank": _RERANK,
    "/rerank": _RERANK,
    "/v1/load_lora_adapter": {
        **_LOAD,
        "in place": {"lora_name": "math", "lora_path": "math", "load_inplace": True},
    },
    "/v1/unload_lora_adapter": _UNLOAD,
    "/load_lora_adapter": _LOAD,
    "/unload_lora_adapter": _UNLOAD,
    "/v1/adapters/route": {"a tenth": {"weights": {"base": 0.9, "math": 0.1}}},
    "/v1/adapters/rollback": {"an adapter": {"lora_name": "math"}},
    "/v1/adapters/delete": {"what would go": {"lora_name": "math", "dry_run": True}},
    "/model/switch-lora": _SWITCH,
    "/v1/model/switch-lora": _SWITCH,
    "/training/checkpoint": _CHECKPOINT,
    "/v1/training/checkpoint": _CHECKPOINT,
    "/v1/training/update": {
        "what waits": {},
        "given": {
            "trajectories": [
                {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "reward": 1, "group_id": "a"},
                {"prompt_token_ids": [1, 2], "completion_token_ids": [5, 4], "reward": 0, "group_id": "a"},
            ]
        },
        "rows of tokens": {
            "trajectories": [
                {"token_ids": [1, 2, 3, 4, 1, 5], "mask": [0, 0, 1, 1, 0, 1], "advantages": 0.5},
                {"token_ids": [1, 2, 5, 4], "mask": [0, 0, 1, 1], "advantages": -0.5},
            ]
        },
    },
    "/v1/training/start": _CONTROL,
    "/v1/training/stop": {"one that is not the default": {"lora_adapter": "math"}},
    "/v1/training/pause": _CONTROL,
    "/v1/training/resume": _CONTROL,
    "/v1/training/rollback": {"the best version": {}},
    "/v1/training/feedback": {"a reward": {"trajectory_id": "traj-0", "score": 1}},
    "/v1/training/preference": {
        "a preference": {"chosen": "Yes.", "rejected_id": "traj-0"},
        "a correction": {"trajectory_id": "traj-0", "correction": "Yes."},
    },
    "/v1/training/compare": {"a checkpoint": {"candidate": "checkpoint-300", "share": 0.2}},
    "/v1/training/compare/stop": _CONTROL,
    "/v1/training/reward_model": {"a tenth held out": {"name": "polite", "held_out": 0.1}},
    "/v1/training/lesson": {
        "a word": {"prompts": ["How do I ask for a spoon?"], "reward": {"word": "please"}},
        "a question": {
            "prompts": ["My dog is called Max."],
            "reward": {"pattern": r"\?\s*\Z"},
            "updates": 20,
        },
    },
    "/v1/training/average": {"two sites": {"adapters": ["north", "south"], "lora_adapter": "mean", "rank": 16}},
    "/v1/training/schedule": {"training first": {"mode": "training_priority", "max_decode_stall_ms": 250}},
    "/tokenize": {"a text": {"prompt": "Hello"}, "a conversation": {"messages": _MESSAGES}},
    "/detokenize": {"ids": {"tokens": [1, 2, 3]}},
}
