"""guidellm's measurement of each route that it and this server have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clients.running import tool
from main_job.serving import Server
from tiny import tiny_tokenizer

pytestmark = [
    pytest.mark.large("guidellm installs torch and CUDA, which take 6 GB"),
    pytest.mark.timeout(600),
]

SAMPLES, TOKENS = 4, 8
GENERATED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@pytest.mark.parametrize("route", [*GENERATED, "/v1/embeddings"])
def test_guidellm_measures_every_route(server: Server, tmp_path: Path, route: str) -> None:
    """`samples` ends it: the prompts that it makes up are without end otherwise."""
    folder, result = tmp_path / "tokenizer", tmp_path / "result.json"
    tiny_tokenizer().save_pretrained(folder)
    command = ["guidellm", "run", "--profile", "kind=concurrent,streams=2", "--output", f"kind=json,path={result}"]
    command += ["--backend", f"kind=openai_http,target={server.url},model=base,request_format={route}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={folder}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={TOKENS}"]
    command += ["--data-loader", f"kind=pytorch,samples={SAMPLES}"]
    tool("guidellm==0.8.1", *command, TRANSFORMERS_OFFLINE="1")
    [found] = json.loads(result.read_text())["benchmarks"]
    counted = found["metrics"]["request_totals"]
    assert (counted["successful"], counted["total"]) == (SAMPLES, SAMPLES)
    for request in found["requests"]["successful"]:
        assert request["prompt_tokens"] > 0
        if route in GENERATED:
            assert request["output"]
            assert request["output_metrics"]["total_tokens"] == request["info"]["timings"]["token_iterations"] == TOKENS
