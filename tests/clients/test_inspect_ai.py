"""`inspect eval` on a few capitals: its log holds what the server says, scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clients.running import tool
from main_job.serving import SERVED, Server

pytestmark = pytest.mark.timeout(900)

INSPECT = "inspect-ai>=0.3.285,<0.4 openai>=3.52,<4"


def test_an_evaluation(server: Server, tmp_path: Path) -> None:
    said = tool(
        INSPECT,
        *("inspect", "eval", "inspect_capitals.py", "--model", f"openai-api/parallm/{SERVED}"),
        *("--temperature", "0", "--max-tokens", "24", "--log-format", "json", "--log-dir", str(tmp_path)),
        *("--display", "plain", "--max-retries", "2"),
        PARALLM_API_KEY="none",
        PARALLM_BASE_URL=f"{server.url}/v1",
    )
    (path,) = tmp_path.glob("*.json")
    log = json.loads(path.read_text())
    answers = {sample["id"]: sample["output"]["completion"] for sample in log["samples"]}
    assert log["status"] == "success"
    assert "Paris" in answers["France"]
    assert answers == {country: asked(server, country) for country in answers}

    right = sum(sample["target"] in answers[sample["id"]] for sample in log["samples"])
    accuracy = log["results"]["scores"][0]["metrics"]["accuracy"]["value"]
    (usage,) = log["stats"]["model_usage"].values()
    assert accuracy == right / len(answers)
    assert f"accuracy  {accuracy:.3f}" in said
    assert f"{usage['total_tokens']} tokens" in said
    assert usage["output_tokens"] == sum(sample["output"]["usage"]["output_tokens"] for sample in log["samples"])


def asked(server: Server, country: str) -> str:
    message = {"role": "user", "content": f"What is the capital of {country}?"}
    answer = server.post("/v1/chat/completions", messages=[message], max_tokens=24, temperature=0)
    content: str = answer["choices"][0]["message"]["content"]
    return content
