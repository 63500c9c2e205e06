# /// script
# requires-python = ">=3.11"
# dependencies = ["ollama==0.6.3"]
# ///
"""ollama-python: `with_ollama.py BASE_URL ASKED PART…` prints one JSON object, an answer for each part."""

import json
import os
import sys
from typing import Literal

os.environ["OLLAMA_HOST"] = sys.argv[1].removesuffix("/v1")

import ollama  # it reads the host when it is imported
from pydantic import BaseModel

ASKED = json.loads(sys.argv[2])
MODEL = f"{ASKED['model']}:latest"
QUESTION = [{"role": "user", "content": ASKED["question"]}]
OPTIONS = {"temperature": 0, "num_predict": ASKED["max_tokens"], "num_ctx": 2048}


class Capital(BaseModel):
    city: Literal["Paris", "London", "Rome"]
    certain: bool


def told(text, last):
    return {"text": text, "usage": [last.prompt_eval_count, last.eval_count]}


def chat():
    answer = ollama.chat(MODEL, QUESTION, options=OPTIONS, keep_alive="5m")
    assert answer.done
    assert 0 < answer.eval_duration < answer.total_duration
    return told(answer.message.content, answer)


def stream():
    parts = list(ollama.chat(MODEL, QUESTION, options=OPTIONS, stream=True))
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 2
    return told("".join(part.message.content for part in parts), parts[-1])


def generate():
    streamed = list(ollama.generate(MODEL, ASKED["question"], options=OPTIONS, stream=True))
    assert (
        "".join(part.response for part in streamed)
        == ollama.generate(MODEL, ASKED["question"], options=OPTIONS).response
    )
    return told("".join(part.response for part in streamed), streamed[-1])


def raw():
    return ollama.generate(MODEL, ASKED["prompt"], raw=True, options=OPTIONS).response


def logprobs():
    answer = ollama.generate(MODEL, ASKED["prompt"], raw=True, logprobs=True, top_logprobs=2, options=OPTIONS)
    assert all(len(token.top_logprobs) == 2 for token in answer.logprobs)
    return "".join(token.token for token in answer.logprobs[:4])


def parsed():
    """A pydantic model's schema as the format, whole and streamed."""
    ask = {"format": Capital.model_json_schema(), "options": {"temperature": 0}}
    whole = Capital.model_validate_json(ollama.chat(MODEL, QUESTION, **ask).message.content)
    streamed = "".join(part.message.content for part in ollama.chat(MODEL, QUESTION, stream=True, **ask))
    assert Capital.model_validate_json(streamed) == whole
    return whole.model_dump()


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: the name of the city
    """
    return f"It is sunny in {city}."


def tool_call():
    """A Python function as the tool. Two calls in the conversation show the model how. The format leaves it the choice
    between a call and the word `unknown`, and makes the server enforce the call's arguments."""
    messages = []
    for city in ("Oslo", "Madrid"):
        call = {"function": {"name": "get_weather", "arguments": {"city": city}}}
        messages += [
            {"role": "user", "content": f"What is the weather in {city}?"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_name": "get_weather", "content": get_weather(city)},
        ]
    messages.append({"role": "user", "content": "What is the weather in Paris?"})
    asked = {"tools": [get_weather], "format": {"enum": ["unknown"]}, "options": {"temperature": 0, "num_predict": 64}}
    answer = ollama.chat(MODEL, messages, **asked).message
    streamed = [part.message.tool_calls or [] for part in ollama.chat(MODEL, messages, stream=True, **asked)]
    result = get_weather(**answer.tool_calls[0].function.arguments)
    messages += [answer, {"role": "tool", "tool_name": "get_weather", "content": result}]
    after = ollama.chat(MODEL, messages, options=OPTIONS).message.content
    return {
        "calls": functions(answer.tool_calls),
        "streamed": functions([call for calls in streamed for call in calls]),
        "after": after,
    }


def functions(calls):
    return [call.function.model_dump() for call in calls]


def models():
    listed, running, shown = ollama.list().models, ollama.ps().models, ollama.show(MODEL)
    return {
        "listed": [model.model for model in listed],
        "running": [model.name for model in running],
        "expires": running[0].expires_at.year,
        "size": [listed[0].size, running[0].size_vram],
        "context": [running[0].context_length, shown.modelinfo[f"{shown.details.family}.context_length"]],
        "capabilities": shown.capabilities,
        "template": shown.template,
    }


def embed():
    assert len(ollama.embeddings(MODEL, "A cat sleeps.").embedding) > 64
    return ollama.embed(MODEL, ["A cat sleeps.", "A dog runs."], dimensions=64).embeddings


def load():
    return [ollama.generate(MODEL, keep_alive=keep_alive).done_reason for keep_alive in ("5m", 0)]


print(json.dumps({part: globals()[part]() for part in sys.argv[3:]}))
