"""The main job, with the real model in a real process: curl completes, the openai client streams a chat."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import jsonschema
import pytest
from main_job.serving import COMMAND, Server, start, stop
from tiny import save_tiny

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def reached_out(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Processes that start meanwhile reach this machine only and have nothing of the hub. A file: who tried to."""
    folder = tmp_path_factory.mktemp("network_cut")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("HF_", "TRANSFORMERS_"))]:
            patch.delenv(name)
        patch.setenv("HF_HOME", str(folder / "hub"))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "network_cut"))
        patch.setenv("REACHED_OUT", str(folder / "reached_out"))
        yield folder / "reached_out"


@pytest.fixture(scope="module")
def server(reached_out: Path) -> Iterator[Server]:
    running = start("--debug", "--enable-rl-training", "--checkpoint-dir", str(reached_out.parent / "run"))
    yield running
    stop(running)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_gets_the_greedy_continuation(server: Server) -> None:
    body = '{"prompt":"The capital of France is","max_tokens":8,"temperature":0}'
    done = subprocess.run(
        ["curl", "-s", f"{server.url}/v1/completions", "-d", body], capture_output=True, check=True, timeout=60
    )
    (choice,) = json.loads(done.stdout)["choices"]
    assert choice["text"].startswith(" Paris")
    assert choice["finish_reason"] == "length"


def test_the_openai_client_streams_a_chat(server: Server) -> None:
    chunks = server.client().chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, reasons = "", None, []
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert "Paris" in text
    assert reasons == ["stop"]
    assert usage is not None
    assert 0 < usage.completion_tokens <= 24


WEATHER = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
CAPITAL = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "inhabitants": {"type": "integer"}},
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}


def test_with_tools_and_a_format_every_finished_answer_is_a_call_or_has_the_format(server: Server) -> None:
    answer = server.client().chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "user", "content": "What is the weather like in the capital of France?"}],
        tools=[{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
        response_format={"type": "json_schema", "json_schema": {"name": "capital", "schema": CAPITAL}},
        parallel_tool_calls=False,
        max_tokens=60,
        temperature=1.0,
        seed=1,
        n=6,
    )
    finished = [choice for choice in answer.choices if choice.finish_reason != "length"]
    assert len(finished) >= 4
    for choice in finished:
        calls = choice.message.tool_calls or []
        text = calls[0].function.arguments if calls else choice.message.content
        jsonschema.validate(json.loads(text or ""), WEATHER if calls else CAPITAL)
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        assert not (calls and choice.message.content)


HELP_OF_ALL = """
import mlx_parallm
from mlx_parallm.cli.main import main, main_parser, serve, train
for name in mlx_parallm.__all__:
    getattr(mlx_parallm, name)
commands = next(action.choices for action in main_parser()._actions if hasattr(action.choices, "keys"))
for program, *arguments in ((serve, "--help"), (train, "--help-all"), *((main, name, "--help") for name in commands)):
    try:
        program(arguments)
    except SystemExit as ended:
        assert not ended.code, arguments
"""


def test_nothing_reaches_another_machine(server: Server, reached_out: Path) -> None:
    """Neither imports, nor help, nor a start with training and the answers to all requests of this file."""
    answers = server.post("/v1/completions", prompt="Say yes:", max_tokens=4, n=2, collect_trajectory=True)
    server.post("/v1/training/feedback", trajectory_id=answers["trajectory_ids"][0], score=1)
    subprocess.run([sys.executable, "-c", HELP_OF_ALL], check=True, stdout=subprocess.DEVNULL, timeout=60)
    assert not reached_out.exists(), reached_out.read_text()
    asks = "import urllib.request; urllib.request.urlopen('http://192.0.2.1')"
    assert subprocess.run([sys.executable, "-c", asks], capture_output=True, check=False, timeout=60).returncode == 1
    assert "192.0.2.1" in reached_out.read_text()
    reached_out.unlink()


def test_books_are_clean_afterwards(server: Server) -> None:
    state = httpx.get(f"{server.url}/debug/state").json()["engine"]
    assert (state["alive"], state["running"], state["waiting"], state["kv_bytes_held"]) == (True, 0, 0, 0)


def test_sigterm_drains(tmp_path: Path) -> None:
    """A running stream finishes, then the process ends with 0. Every unit of device work is in the debug trace."""
    save_tiny("llama", tmp_path)
    trace = tmp_path / "trace.json"
    running = start("--model-path", str(tmp_path), "--debug-trace", str(trace), "--speculation", "off")
    try:
        stream = running.client().completions.create(
            model="base", prompt="Hello", max_tokens=600, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(iter(stream))
        running.process.send_signal(signal.SIGTERM)
        reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
        assert first.choices[0].finish_reason is None
        assert reasons[-1] == "length"
        assert running.process.wait(timeout=20) == 0
        assert [unit["name"] for unit in json.loads(trace.read_text() + "]")].count("forward") >= 600
    finally:
        running.process.kill()


TOO_LONG = ("--max-model-len", "1000000")


def test_a_process_whose_server_cannot_start_ends(tmp_path: Path) -> None:
    """This one finds out when its model is loaded."""
    save_tiny("llama", tmp_path)
    command = [*COMMAND, "--model-path", str(tmp_path), *TOO_LONG]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: max_model_len 1000000 is more than" in done.stderr
    assert "terminate" not in done.stderr
