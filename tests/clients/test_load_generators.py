"""Programs that measure a server's speed. Each must count every request as answered, with the tokens it asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from clients.running import tool
from main_job.serving import Server
from tiny import tiny_tokenizer

PROMPTS = ("Name a color.", "Say hello.", "Name an animal.", "Name a city.")
TOKENS = 8
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def test_evalscope_perf_measures_streamed_chats(server: Server, tmp_path: Path) -> None:
    """It needs no hub if its prompts are the lines of a file."""
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    command = ["evalscope", "perf", "--api", "openai", "--model", "base", "--stream", "--no-timestamp"]
    command += ["--url", f"{server.url}/v1/chat/completions", "--outputs-dir", str(out)]
    command += ["--dataset", "line_by_line", "--dataset-path", str(prompts), "--min-prompt-length", "1"]
    command += ["--number", str(len(PROMPTS)), "--parallel", "2", "--max-tokens", str(TOKENS)]
    tool("evalscope[perf]==1.14.1", *command, **OFFLINE)
    [summary] = out.glob("base/*/benchmark_summary.json")
    found = json.loads(summary.read_text())
    assert (found["Success Requests"], found["Failed Requests"]) == (len(PROMPTS), 0)
    assert found["Stream Requests"] == len(PROMPTS)
    assert 0 < found["Avg Output Tokens"] <= TOKENS
    assert found["Avg TTFT (ms)"] > 0


@pytest.fixture
def book_url(tmp_path: Path) -> Iterator[str]:
    """Where a text lies from which prompts are cut."""
    (tmp_path / "book.txt").write_text("Once upon a time there was a fox. " * 2000)
    web = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    Thread(target=web.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{web.server_port}/book.txt"
    web.shutdown()
    web.server_close()


def test_llama_benchy_measures_prompts_and_answers(server: Server, tmp_path: Path, book_url: str) -> None:
    """It needs no hub if its tokenizer is a folder and its book is at an address of this machine."""
    folder, result = tmp_path / "tokenizer", tmp_path / "result.json"
    tiny_tokenizer().save_pretrained(folder)
    command = ["llama-benchy", "--base-url", f"{server.url}/v1", "--model", "base", "--tokenizer", str(folder)]
    command += ["--book-url", book_url, "--pp", "32", "--tg", str(TOKENS), "--depth", "0", "--runs", "1"]
    command += ["--latency-mode", "none", "--skip-coherence", "--format", "json", "--save-result", str(result)]
    tool("llama-benchy==0.4.0", *command, **OFFLINE)
    [found] = json.loads(result.read_text())["benchmarks"]
    assert (found["prompt_size"], found["response_size"]) == (32, TOKENS)
    assert found["pp_throughput"]["mean"] > 0
    assert found["tg_throughput"]["mean"] > 0
