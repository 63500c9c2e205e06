# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents>=0.9,<1"]
# ///
"""openai-agents: `with_openai_agents.py BASE_URL ASKED PART…` prints one JSON object, an answer for each part."""

import asyncio
import json
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

URL, ASKED = sys.argv[1], json.loads(sys.argv[2])
CLIENT = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
MODELS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
set_tracing_disabled(True)


class Capital(BaseModel):
    city: Literal["Paris", "London", "Rome"]
    certain: bool


def agent(api="responses", name=ASKED["model"], max_tokens=128, tool_choice=None, **fields):
    one_call = {"parallel_tool_calls": False} if tool_choice else {}
    settings = ModelSettings(temperature=0, max_tokens=max_tokens, tool_choice=tool_choice, **one_call)
    return Agent(name="guide", model=MODELS[api](name, CLIENT), model_settings=settings, **fields)


async def chat():
    result = await Runner.run(agent("chat", max_tokens=ASKED["max_tokens"]), ASKED["question"])
    usage = result.context_wrapper.usage
    return {"text": result.final_output, "usage": [usage.input_tokens, usage.output_tokens]}


async def stream():
    result = Runner.run_streamed(agent(max_tokens=ASKED["max_tokens"]), ASKED["question"])
    async for _ in result.stream_events():
        pass
    usage = result.context_wrapper.usage
    return {"text": result.final_output, "usage": [usage.input_tokens, usage.output_tokens]}


async def parsed():
    return (await Runner.run(agent(output_type=Capital), ASKED["question"])).final_output.model_dump()


async def tool_call():
    """The model must call the tool, whose typed result ends the run; `pieces` of its arguments arrive."""

    @function_tool
    def capital(city: Literal["Paris", "London", "Rome"]) -> Capital:
        """Says whether a city is the capital of France."""
        return Capital(city=city, certain=True)

    answers = {}
    for api in MODELS:
        asked = {"tools": [capital], "tool_choice": "required", "tool_use_behavior": "stop_on_first_tool"}
        result = Runner.run_streamed(agent(api, output_type=Capital, **asked), ASKED["question"])
        events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        answers[api] = {"output": result.final_output.model_dump(), "arguments": "".join(pieces), "pieces": len(pieces)}
    return answers


async def all_parts():
    return {part: await globals()[part]() for part in sys.argv[3:]}


print(json.dumps(asyncio.run(all_parts())))
