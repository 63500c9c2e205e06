"""Programs of the Tinker API: requests in order, `path` and body on a line each, in a session with a model.

In a body, SESSION, MODEL and SAMPLER stand for their ids, and FUTURE for what the last request may wait for.
"""

import asyncio
import json
from random import Random

from fuzz.mutation import LONGEST, bytes_mutated, json_with
from fuzz.wire import LARGE_CARD, Wire
from protocols.fake_policies import FakePolicies

from mlx_parallm.config import TinkerConfig
from mlx_parallm.extras.tinker import route
from mlx_parallm.extras.tinker.server import TinkerServer

route.POLL_S = 0.01  # what waits for a request that never comes is asked for once

POLICIES = FakePolicies()
WIRE = Wire(tinker=TinkerServer(POLICIES, LARGE_CARD, TinkerConfig(max_sessions=3)))
ROUTES = [
    "get_info",
    "unload_model",
    "forward_backward",
    "forward",
    "optim_step",
    "retrieve_future",
    "cancel_future",
    "create_model",
    "asample",
    "create_sampling_session",
    "save_weights",
    "save_weights_for_sampler",
    "load_weights",
    "weights_info",
    "session_heartbeat",
]
NAMES = [
    "model_id",
    "session_id",
    "seq_id",
    "forward_backward_input",
    "forward_input",
    "data",
    "model_input",
    "chunks",
    "tokens",
    "loss_fn_inputs",
    "type",
    "loss_fn",
    "loss_fn_config",
    "shape",
    "dtype",
    "target_tokens",
    "weights",
    "logprobs",
    "advantages",
    "adam_params",
    "learning_rate",
    "beta1",
    "eps",
    "request_id",
    "sampling_session_id",
    "num_samples",
    "prompt",
    "sampling_params",
    "max_tokens",
    "seed",
    "stop",
    "temperature",
    "top_p",
    "path",
    "optimizer",
    "overwrite",
    "lora_config",
    "rank",
    "base_model",
    "model_seq_id",
    "prompt_logprobs",
    "topk_prompt_logprobs",
]
WORDS = ("MODEL", "SESSION", "SAMPLER", "FUTURE", "float32", "int64", "cross_entropy", "ppo", "encoded_text", [1, 2], 3)
of_body = json_with(NAMES, WORDS)
LORA = {"rank": 4, "train_unembed": True, "train_mlp": True, "train_attn": True}


def mutated(data, rng: Random):
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    path, _, body = lines[at].partition(b" ")
    match rng.randrange(10):
        case 0:
            lines[at] = rng.choice(ROUTES).encode() + b" " + body
        case 1:
            lines.insert(at, rng.choice(lines))
        case 2:
            del lines[at]
        case 3:
            lines[at] = bytes_mutated(lines[at], rng)
        case _:
            lines[at] = path + b" " + of_body(body, rng).replace(b"\n", b" ")
    return b"\n".join(lines[:12])[:LONGEST]


def post(path, body):
    status, answer = WIRE.ask("POST", f"/api/v1/{path}", body if isinstance(body, bytes) else json.dumps(body).encode())
    value = json.loads(answer) if answer else {}
    return value if status == 200 and isinstance(value, dict) else {}


def run(data):
    WIRE.reset()
    POLICIES.calls.clear()
    session = post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.24.1"})["session_id"]
    try:
        made = {"session_id": session, "model_seq_id": 0, "base_model": LARGE_CARD.name, "lora_config": LORA}
        ids = {"SESSION": session, "FUTURE": post("create_model", made)["request_id"], "SAMPLER": "none"}
        ids["MODEL"] = post("retrieve_future", {"request_id": ids["FUTURE"]})["model_id"]
        for line in data.split(b"\n")[:12]:
            path, _, body = line.partition(b" ")
            name = path.decode("ascii", "replace")
            if name not in ROUTES:
                continue
            for word, value in ids.items():
                body = body.replace(word.encode(), value.encode())
            answer = post(name, body)
            ids["FUTURE"] = str(answer.get("request_id", ids["FUTURE"]))
            ids["SAMPLER"] = str(answer.get("sampling_session_id", ids["SAMPLER"]))
    finally:
        post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        WIRE.runner.run(asyncio.sleep(0.001))
        WIRE.check_idle()
