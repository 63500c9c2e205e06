# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai]>=2,<3"]
# ///
"""pydantic-ai: `with_pydantic_ai.py BASE_URL ASKED PART…` prints one JSON object, an answer for each part."""

import asyncio
import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, ASKED = sys.argv[1], json.loads(sys.argv[2])
PROVIDER = OpenAIProvider(base_url=URL, api_key="none")
SHORT = {"temperature": 0.0, "max_tokens": ASKED["max_tokens"]}
LONGER = SHORT | {"max_tokens": 128, "parallel_tool_calls": False}


class Capital(BaseModel):
    city: Literal["Paris", "London", "Rome"]
    certain: bool


def model(name=ASKED["model"]):
    return OpenAIChatModel(name, provider=PROVIDER)


async def chat():
    result = await Agent(model(), model_settings=SHORT).run(ASKED["question"])
    return {"text": result.output, "usage": [result.usage.input_tokens, result.usage.output_tokens]}


async def stream():
    async with Agent(model(), model_settings=SHORT).run_stream(ASKED["question"]) as result:
        text = await result.get_output()
        return {"text": text, "usage": [result.usage.input_tokens, result.usage.output_tokens]}


async def parsed():
    agent = Agent(model(), model_settings=LONGER, output_type=NativeOutput(Capital))
    return (await agent.run(ASKED["question"])).output.model_dump()


async def parsed_by_responses():
    responses = OpenAIResponsesModel(ASKED["model"], provider=PROVIDER)
    agent = Agent(responses, model_settings=LONGER, output_type=NativeOutput(Capital))
    return (await agent.run(ASKED["question"])).output.model_dump()


async def parsed_by_tool():
    """An output tool is required, so that the server enforces its call; whole and streamed."""
    agent = Agent(model(), model_settings=LONGER, output_type=ToolOutput(Capital))
    whole = (await agent.run(ASKED["question"])).output.model_dump()
    async with agent.run_stream(ASKED["question"]) as result:
        return {"whole": whole, "streamed": (await result.get_output()).model_dump()}


print(json.dumps({part: asyncio.run(globals()[part]()) for part in sys.argv[3:]}))
