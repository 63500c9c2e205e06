# /// script
# requires-python = ">=3.11"
# dependencies = ["atroposlib==0.4.0"]
# ///
"""atroposlib: `with_atropos_servers.py BASE_URL ASKED PART…` prints one JSON object, an answer for each part.

Its managed server plays two turns of a chat, as environments do, and its own clients ask for the tokens.
"""

import asyncio
import json
import sys

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer

URL, ASKED = sys.argv[1], json.loads(sys.argv[2])
KINDS = {"vllm": VLLMServer, "sglang": SGLangServer}
OPTIONS = {"max_tokens": ASKED["max_tokens"], "temperature": 1.0, "seed": 1}


def server(kind):
    config = APIServerConfig(
        base_url=URL,
        api_key="none",
        model_name=ASKED["tokenizer"],
        tokenizer_name=ASKED["tokenizer"],
        server_type=kind,
        health_check=False,
    )
    return KINDS[kind](config)


async def two_turns(kind):
    """The one sequence that both turns make."""
    managed = ManagedServer(server(kind))
    messages = [{"role": "user", "content": ASKED["question"]}]
    options = {**OPTIONS, "sampling_seed": 1} if kind == "sglang" else OPTIONS
    if kind == "sglang":
        options.pop("seed")
    first = await managed.chat_completion(messages=messages, **options)
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    messages.append({"role": "user", "content": "Say it again."})
    await managed.chat_completion(messages=messages, **options)
    return [
        {"tokens": node.tokens, "masks": node.masked_tokens, "logprobs": node.logprobs}
        for node in managed.get_state()["nodes"]
    ]


async def scored():
    answer = await server("vllm").get_logprobs(prompt=ASKED["question"], top_k=2)
    return {name: answer[name] for name in ("prompt_tokens", "prompt_topk_token_ids", "prompt_topk_logprobs")}


async def several():
    """Four answers at once, and why each ended."""
    ask = {"prompt": ASKED["question"], "n": 4, **OPTIONS}
    _, tokens, logprobs, reasons = await server("vllm").tokens_and_logprobs_completion(**ask)
    return {"tokens": tokens, "logprobs": logprobs, "reasons": reasons}


PARTS = {"vllm": lambda: two_turns("vllm"), "sglang": lambda: two_turns("sglang")}
PARTS |= {"scored": scored, "several": several}


async def main():
    return {part: await PARTS[part]() for part in sys.argv[3:]}


print(json.dumps(asyncio.run(main())))
