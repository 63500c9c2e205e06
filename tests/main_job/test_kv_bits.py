"""The real server with quantized keys and values: what it says is what it says in full precision."""

from __future__ import annotations

import pytest
from main_job.serving import Server, in_thread

pytestmark = pytest.mark.slow

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 12
"""About 200 tokens, so three blocks of it are quantized."""


def said(server: Server, **fields: object) -> tuple[str, list[float]]:
    """A greedy answer of 48 tokens, and their logprobs."""
    body = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0, "ignore_eos": True, "logprobs": 0, **fields}
    [choice] = server.post("/v1/completions", **body)["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def test_a_server_with_8_bits_answers_as_one_without() -> None:
    with in_thread() as server:
        expected, logprobs = said(server)
    with in_thread("--kv-bits", "8") as server:
        text, near = said(server)
        cached, again = said(server)
    assert text == cached == expected
    assert near == pytest.approx(logprobs, abs=0.05)
    assert again == pytest.approx(near, abs=0.02)
