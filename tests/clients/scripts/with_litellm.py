# /// script
# requires-python = ">=3.11"
# dependencies = ["litellm>=1.106,<2", "mcp>=2,<3"]
# ///
"""litellm: `with_litellm.py BASE_URL ASKED PART…` prints one JSON object, an answer for each part."""

import asyncio
import json
import sys
from typing import Literal

import litellm
from pydantic import BaseModel

URL, ASKED = sys.argv[1], json.loads(sys.argv[2])
SERVER = {"api_base": URL, "api_key": "none", "num_retries": 0}
QUESTION = {"role": "user", "content": ASKED["question"]}
SAID = {
    "model": f"openai/{ASKED['model']}",
    "messages": [QUESTION],
    "max_tokens": ASKED["max_tokens"],
    "temperature": 0,
}
LONGER = SAID | {"max_tokens": 128}


class Capital(BaseModel):
    city: Literal["Paris", "London", "Rome"]
    certain: bool


def told(text, usage):
    return {"text": text, "usage": [usage.prompt_tokens, usage.completion_tokens]}


def chat():
    answer = litellm.completion(**SAID, **SERVER)
    return told(answer.choices[0].message.content, answer.usage)


def stream():
    usage, text = None, ""
    for chunk in litellm.completion(**SAID, **SERVER, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = getattr(chunk, "usage", None) or usage
    return told(text, usage)


def completion():
    model = f"text-completion-openai/{ASKED['model']}"
    said = {"prompt": ASKED["prompt"], "max_tokens": ASKED["max_tokens"], "temperature": 0}
    return litellm.text_completion(model=model, **said, **SERVER).choices[0].text


def parsed():
    text = litellm.completion(**LONGER, **SERVER, response_format=Capital).choices[0].message.content
    return Capital.model_validate_json(text).model_dump()


def tool_call():
    """Its path for tools imports `mcp`, which it does not install."""
    tools = {"tools": [{"type": "function", "function": ASKED["tool"]}], "parallel_tool_calls": False}
    said = LONGER | tools | {"tool_choice": "required"}
    whole = litellm.completion(**said, **SERVER)
    chunks = list(litellm.completion(**said, **SERVER, stream=True))
    streamed = litellm.stream_chunk_builder(chunks)
    return {"calls": calls(whole), "streamed": calls(streamed)}


def ollama():
    """By Ollama's routes, whole, asynchronously and streamed; `ollama/` makes the prompt itself."""
    return {provider: by_ollama(f"{provider}/{ASKED['model']}") for provider in ("ollama_chat", "ollama")}


def by_ollama(model):
    said = SAID | {"model": model, "api_base": URL.removesuffix("/v1")}
    chunks = list(litellm.completion(**said, stream=True))
    answers = [
        litellm.completion(**said),
        asyncio.run(litellm.acompletion(**said)),
        litellm.stream_chunk_builder(chunks),
    ]
    return [answer.choices[0].message.content for answer in answers]


def ollama_vectors():
    asked = {"model": f"ollama/{ASKED['model']}", "input": ["A cat sleeps.", "A dog runs."]}
    answer = litellm.embedding(**asked, api_base=URL.removesuffix("/v1"))
    return [vector["embedding"] for vector in answer.data]


def too_long():
    try:
        litellm.completion(**SAID | {"messages": [{"role": "user", "content": "word " * 9000}]}, **SERVER)
    except litellm.ContextWindowExceededError as error:
        return str(error)


def calls(answer):
    made = answer.choices[0].message.tool_calls
    return [{"name": call.function.name, "arguments": json.loads(call.function.arguments)} for call in made]


print(json.dumps({part: globals()[part]() for part in sys.argv[3:]}))
