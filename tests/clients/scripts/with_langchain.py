# /// script
# requires-python = ">=3.11"
# dependencies = ["langchain-openai>=1.7,<2"]
# ///
"""langchain-openai: `with_langchain.py BASE_URL ASKED PART…` prints one JSON object, an answer for each part."""

import json
import sys
from typing import Literal

from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, ASKED = sys.argv[1], json.loads(sys.argv[2])
SERVER = {"base_url": URL, "api_key": "none", "max_retries": 0, "temperature": 0}
CHAT = ChatOpenAI(model=ASKED["model"], max_tokens=ASKED["max_tokens"], stream_usage=True, **SERVER)
LONGER = ChatOpenAI(model=ASKED["model"], max_tokens=128, **SERVER)


class Capital(BaseModel):
    city: Literal["Paris", "London", "Rome"]
    certain: bool


def told(message):
    return {"text": message.text, "usage": [message.usage_metadata[f"{way}_tokens"] for way in ("input", "output")]}


def chat():
    return told(CHAT.invoke(ASKED["question"]))


def stream():
    first, *more = CHAT.stream(ASKED["question"])
    return told(sum(more, first))


def completion():
    return OpenAI(model=ASKED["model"], max_tokens=ASKED["max_tokens"], **SERVER).invoke(ASKED["prompt"])


def parsed():
    return LONGER.with_structured_output(Capital, method="json_schema").invoke(ASKED["question"]).model_dump()


def tool_call():
    tools = [{"type": "function", "function": ASKED["tool"]}]
    bound = LONGER.bind_tools(tools, tool_choice="required", parallel_tool_calls=False)
    first, *more = bound.stream(ASKED["question"])
    return {"calls": calls(bound.invoke(ASKED["question"])), "streamed": calls(sum(more, first))}


def vectors():
    """In one request, because its batches are of 1,000 texts. It sends OpenAI's tokens unless it is told not to."""
    embeddings = OpenAIEmbeddings(model=ASKED["model"], base_url=URL, api_key="none", check_embedding_ctx_length=False)
    return embeddings.embed_documents(ASKED["texts"])


def calls(message):
    return [{"name": call["name"], "arguments": call["args"]} for call in message.tool_calls]


print(json.dumps({part: globals()[part]() for part in sys.argv[3:]}))
