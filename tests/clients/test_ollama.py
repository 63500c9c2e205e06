"""Ollama's clients, ollama-python 0.6.3 and ollama-js 0.6, unmodified, against Ollama's API."""

from __future__ import annotations

import math
from typing import Any

import pytest
from clients.asked import ASKED
from clients.running import script
from main_job.serving import SERVED, Server

pytestmark = pytest.mark.timeout(900)


def told_by(server: Server, *parts: str) -> dict[str, Any]:
    return script("with_ollama.py", server.url, ASKED, parts)


def test_it_hears_what_plain_http_hears(server: Server) -> None:
    """Chat and generate, whole and streamed; a text that is continued."""
    common = {"model": SERVED, "max_tokens": ASKED["max_tokens"], "temperature": 0}
    chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": ASKED["question"]}], **common)
    text, usage = chat["choices"][0]["message"]["content"], chat["usage"]
    completion = server.post("/v1/completions", prompt=ASKED["prompt"], **common)["choices"][0]["text"]
    told = told_by(server, "chat", "stream", "generate", "raw", "logprobs")
    assert "Paris" in text
    expected = {"text": text, "usage": [usage["prompt_tokens"], usage["completion_tokens"]]}
    assert told["chat"] == told["stream"] == told["generate"] == expected
    assert told["raw"] == completion
    assert completion.startswith(told["logprobs"])


def test_a_pydantic_schema_is_followed(server: Server) -> None:
    assert told_by(server, "parsed")["parsed"]["city"] in ("Paris", "London", "Rome")


def test_a_python_function_is_called(server: Server) -> None:
    told = told_by(server, "tool_call")["tool_call"]
    assert told["calls"] == told["streamed"] == [{"name": "get_weather", "arguments": {"city": "Paris"}}]
    assert told["after"]


def test_models_are_listed_and_shown(server: Server) -> None:
    told = told_by(server, "models", "load")
    models = told["models"]
    assert (SERVED in models["listed"], models["running"][0], models["expires"] > 2100) == (True, SERVED, True)
    assert models["size"][0] == models["size"][1] > 10**8
    assert models["context"] == [8192, 8192]
    assert models["capabilities"] == ["completion", "tools", "embedding"]
    assert "<|im_start|>" in models["template"]
    assert told["load"] == ["load", "unload"]


def test_vectors_have_length_one(server: Server) -> None:
    vectors = told_by(server, "embed")["embed"]
    assert [len(vector) for vector in vectors] == [64, 64]
    assert all(math.isclose(math.hypot(*vector), 1, rel_tol=1e-5) for vector in vectors)
    assert vectors[0] != vectors[1]


def test_the_javascript_client(server: Server, node: None) -> None:
    """A vector of the older route is the newer one's, but for its length."""
    asked = {"messages": [{"role": "user", "content": ASKED["question"]}], "max_tokens": ASKED["max_tokens"]}
    chat = server.post("/v1/chat/completions", model=SERVED, temperature=0, **asked)
    told = script("with_ollama.js", server.url, ASKED, ("chat", "stream", "embeddings", "embed"))
    assert told["chat"] == told["stream"] == chat["choices"][0]["message"]["content"]
    length = math.hypot(*told["embeddings"])
    assert length > 1.1
    assert math.dist([number / length for number in told["embeddings"]], told["embed"]) < 1e-3
