# /// script
# requires-python = ">=3.11"
# dependencies = ["anthropic>=2.12,<3"]
# ///
"""Anthropic's SDK: `with_anthropic.py BASE_URL ASKED PART…` prints one JSON object, an answer for each part."""

import json
import sys

from anthropic import Anthropic

URL, ASKED = sys.argv[1].removesuffix("/v1"), json.loads(sys.argv[2])
CLIENT = Anthropic(base_url=URL, api_key="none", max_retries=0)
QUESTION = {"role": "user", "content": ASKED["question"]}
SAID = {"model": ASKED["model"], "messages": [QUESTION], "max_tokens": ASKED["max_tokens"]}
SAID["extra_body"] = {"temperature": 0}  # the SDK has no argument for it
FUNCTION = ASKED["tool"]
TOOL = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
LONGER = SAID | {"max_tokens": 128, "tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


def told(message):
    (block,) = message.content
    assert (message.type, message.role, block.type) == ("message", "assistant", "text")
    return {"text": block.text, "usage": [prompt_tokens(message.usage), message.usage.output_tokens]}


def prompt_tokens(usage):
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def chat():
    return told(CLIENT.messages.create(**SAID))


def stream():
    with CLIENT.messages.stream(**SAID) as events:
        text = "".join(events.text_stream)
        message = events.get_final_message()
    assert text == message.content[0].text
    return told(message)


def raw_events():
    return [event.type for event in CLIENT.messages.create(**SAID | {"max_tokens": 3}, stream=True)]


def tool_call():
    """Not streamed, and streamed with the client's own accumulator; then the tool's result is told."""
    message = CLIENT.messages.create(**LONGER)
    with CLIENT.messages.stream(**LONGER) as events:
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        streamed = events.get_final_message()
    (call,) = message.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain, 12 degrees"}]}
    turns = [QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    end = CLIENT.messages.create(**LONGER | {"messages": turns, "tool_choice": {"type": "none"}})
    return {
        "calls": named(message),
        "streamed": named(streamed),
        "pieces": len(pieces),
        "reasons": [message.stop_reason, streamed.stop_reason],
        "after": end.content[0].text,
    }


def named(message):
    return [{"name": block.name, "arguments": block.input} for block in message.content if block.type == "tool_use"]


def thinking():
    """A message with reasoning and text, streamed and whole. A random model writes both with some seed."""
    for seed in range(40):
        asked = SAID | {"max_tokens": 512, "extra_body": {"temperature": 1, "seed": seed}}
        whole = CLIENT.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
        if len(whole.content) == 2:
            break
    with CLIENT.messages.stream(**asked, thinking={"type": "adaptive"}) as events:
        told = [event for event in events if event.type in ("thinking", "signature")]
        streamed = events.get_final_message()
    assert said(streamed) == said(whole)
    assert told[-2].snapshot == whole.content[0].thinking
    turns = [QUESTION, {"role": "assistant", "content": whole.content}, QUESTION]
    return {
        "blocks": [block.type for block in whole.content],
        "last_told": told[-1].type,
        "disabled": [block.type for block in CLIENT.messages.create(**asked, thinking={"type": "disabled"}).content],
        "sent_back": CLIENT.messages.create(**asked | {"messages": turns}).type,
    }


def said(message):
    """The texts of the blocks, each with its type, which is the field's name too."""
    return [(block.type, getattr(block, block.type)) for block in message.content]


def parsed():
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    format_ = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    return json.loads(CLIENT.messages.create(**SAID, output_config={"format": format_}).content[0].text)


def count():
    counted = CLIENT.messages.count_tokens(model=ASKED["model"], messages=[QUESTION])
    beta = CLIENT.beta.messages.count_tokens(model=ASKED["model"], messages=[QUESTION], system="Be brief.", betas=["x"])
    return [counted.input_tokens, beta.input_tokens]


def thread():
    """Three turns, of which each gives only what is new, and the last is streamed; then the same without a thread."""
    thread = CLIENT.beta.messages.thread(**SAID | {"messages": [{"role": "user", "content": "My name is Bob."}]})
    assert thread.send().id == thread.previous_message_id
    thread.send(QUESTION)
    with thread.stream({"role": "user", "content": "What is my name?"}) as events:
        last = events.get_final_message()
    *before, _ = thread.messages
    whole = CLIENT.messages.create(**SAID | {"messages": before})
    return {"said": [message["role"] for message in before], "last": told(last), "whole": told(whole)}


print(json.dumps({part: globals()[part]() for part in sys.argv[3:]}))
