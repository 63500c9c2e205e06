"""`llm`, with the server in its extra-openai-models.yaml."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from clients.running import tool
from jsonschema import validate
from main_job.serving import SERVED, Server

pytestmark = pytest.mark.timeout(900)

LLM = "llm>=0.36,<1"
QUESTION, PROMPT = "What is the capital of France?", "The capital of France is"
GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", "24")
COUNTRY = {
    "type": "object",
    "properties": {"capital": {"enum": ["Paris", "Rome"]}, "in_europe": {"type": "boolean"}},
    "required": ["capital", "in_europe"],
    "additionalProperties": False,
}

Ask = Callable[..., str]


@pytest.fixture
def ask(server: Server, tmp_path: Path) -> Ask:
    """`llm` with a home of its own."""
    here = {"model_name": SERVED, "api_base": f"{server.url}/v1"}
    chat = {"model_id": "chat", "supports_schema": True, "supports_tools": True, **here}
    models = [chat, {"model_id": "completion", "completion": True, **here}]
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
    return lambda *arguments: tool(LLM, "llm", *arguments, LLM_USER_PATH=str(tmp_path))


def test_chat_streamed_and_not(server: Server, ask: Ask) -> None:
    """Both are printed alike, and logged with the tokens that were counted."""
    message = {"role": "user", "content": QUESTION}
    answer = server.post("/v1/chat/completions", messages=[message], max_tokens=24, temperature=0)
    text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
    assert "Paris" in text
    assert ask("-m", "chat", *GREEDY, QUESTION) == f"{text}\n"
    assert ask("-m", "chat", *GREEDY, "--no-stream", QUESTION) == f"{text}\n"
    logged = json.loads(ask("logs", "-n", "2", "--json"))
    counted = {(entry["response"], entry["input_tokens"], entry["output_tokens"]) for entry in logged}
    assert counted == {(text, usage["prompt_tokens"], usage["completion_tokens"])}


def test_a_completion(server: Server, ask: Ask) -> None:
    """It asks for usage at the end of a stream, on completions too."""
    answer = server.post("/v1/completions", prompt=PROMPT, max_tokens=24, temperature=0)
    assert ask("-m", "completion", *GREEDY, PROMPT) == answer["choices"][0]["text"] + "\n"


def test_a_schema(ask: Ask) -> None:
    answer = ask("-m", "chat", "-o", "temperature", "0", "--schema", json.dumps(COUNTRY), QUESTION)
    validate(json.loads(answer), COUNTRY)
