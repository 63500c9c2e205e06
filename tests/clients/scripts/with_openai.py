# /// script
# requires-python = ">=3.11"
# dependencies = ["openai>=3.52,<4"]
# ///
"""openai-python: `with_openai.py BASE_URL ASKED PART…` prints one JSON object, an answer for each part."""

import asyncio
import json
import sys
from typing import Literal

from openai import AsyncOpenAI, NotFoundError, OpenAI
from pydantic import BaseModel

URL, ASKED = sys.argv[1], json.loads(sys.argv[2])
CLIENT = OpenAI(base_url=URL, api_key="none", max_retries=0)
QUESTION = {"role": "user", "content": ASKED["question"]}
SAID = {"model": ASKED["model"], "messages": [QUESTION], "max_tokens": ASKED["max_tokens"], "temperature": 0}
LONGER = SAID | {"max_tokens": 128}
TOOLS = {"tools": [{"type": "function", "function": ASKED["tool"]}], "parallel_tool_calls": False}


class Capital(BaseModel):
    city: Literal["Paris", "London", "Rome"]
    certain: bool


def told(text, usage):
    return {"text": text, "usage": [usage.prompt_tokens, usage.completion_tokens]}


def chat():
    answer = CLIENT.chat.completions.create(**SAID)
    return told(answer.choices[0].message.content, answer.usage)


def stream():
    usage, text = None, ""
    for chunk in CLIENT.chat.completions.create(**SAID, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    return told(text, usage)


def completion():
    said = {"model": ASKED["model"], "prompt": ASKED["prompt"], "max_tokens": ASKED["max_tokens"], "temperature": 0}
    return CLIENT.completions.create(**said).choices[0].text


def together():
    async def ask():
        async with AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**SAID) for _ in range(4)))
        return [answer.choices[0].message.content for answer in answers]

    return asyncio.run(ask())


def parsed():
    message = CLIENT.chat.completions.parse(**LONGER, response_format=Capital).choices[0].message
    return message.parsed.model_dump()


def unknown_model():
    try:
        CLIENT.chat.completions.create(**SAID | {"model": "nobody"})
    except NotFoundError as error:
        return str(error)


def tool_call():
    """Not streamed, and streamed with the client's own accumulator; then the tool's result is told."""
    said = LONGER | TOOLS
    message = CLIENT.chat.completions.create(**said, tool_choice="required").choices[0].message
    with CLIENT.chat.completions.stream(**said, tool_choice="required") as events:
        streamed = events.get_final_completion().choices[0].message
    told = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain, 12 degrees"}
    end = CLIENT.chat.completions.create(**said | {"messages": [QUESTION, message, told]}, tool_choice="none")
    return {
        "calls": [named(call) for call in message.tool_calls],
        "streamed": [named(call) for call in streamed.tool_calls],
        "after": end.choices[0].message.content,
    }


def named(call):
    return {"name": call.function.name, "arguments": json.loads(call.function.arguments)}


print(json.dumps({part: globals()[part]() for part in sys.argv[3:]}))
