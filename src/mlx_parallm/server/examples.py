"""Bodies for the OpenAPI document, by path and name. Each can be sent as it stands to a server that trains, with
an adapter `math`; those of a trajectory and of a folder need one of that name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Bodies = Mapping[str, Mapping[str, Any]]

_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
_CONTROL: Bodies = {"default adapter": {}}
_SWITCH: Bodies = {"one version": {"version": "math@1"}, "the model itself": {"version": "base"}}
_CHECKPOINT: Bodies = {"tagged": {"lora_name": "math", "checkpoint_name": "mine", "metrics": {"accuracy": 0.75}}}

BODIES: Mapping[str, Bodies] = {
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
    "/v1/responses": {
        "a question": {"input": "What is the capital of France?", "max_output_tokens": 8},
        "items": {"input": _MESSAGES, "instructions": "Be brief.", "max_output_tokens": 8, "store": False},
        "as a stream": {"input": "Hello", "max_output_tokens": 8, "stream": True},
    },
    "/v1/responses/input_tokens": {"a question": {"input": "What is the capital of France?"}},
    "/v1/load_lora_adapter": {
        "from a folder": {"lora_name": "tone", "lora_path": "tone"},
        "in place": {"lora_name": "math", "lora_path": "math", "load_inplace": True},
    },
    "/v1/unload_lora_adapter": {"all versions": {"lora_name": "math"}},
    "/v1/adapters/route": {"a tenth": {"weights": {"base": 0.9, "math": 0.1}}},
    "/v1/adapters/rollback": {"an adapter": {"lora_name": "math"}},
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
    },
    "/v1/training/start": _CONTROL,
    "/v1/training/pause": _CONTROL,
    "/v1/training/resume": _CONTROL,
    "/v1/training/rollback": {"the best version": {}},
    "/v1/training/feedback": {"a reward": {"trajectory_id": "traj-0", "score": 1}},
    "/v1/training/schedule": {"training first": {"mode": "training_priority", "max_decode_stall_ms": 250}},
    "/tokenize": {"a text": {"prompt": "Hello"}, "a conversation": {"messages": _MESSAGES}},
    "/detokenize": {"ids": {"tokens": [1, 2, 3]}},
}
