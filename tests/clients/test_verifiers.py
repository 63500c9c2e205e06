"""verifiers 0.4, unmodified: its eval client by chat, its train client by tokens, in two turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clients.running import EXAMPLES, PYTHON, UV, printed
from main_job.serving import Server

from mlx_parallm.cli.main import main

pytestmark = pytest.mark.timeout(900)

PACKAGES = ("--from", "verifiers==0.4.0", "--with", "transformers>=5", "--with", "jinja2")
ENVIRONMENT = EXAMPLES / "verifiers"
HARNESS = ("--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess")
"""verifiers' own program, which is started for each turn."""
ROLLOUTS = ("-n", "2", "-r", "2", "--sampling.max-tokens", "12", "--sampling.temperature", "1.0")

Play = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def play(server: Server, tmp_path: Path) -> Play:
    """The traces of an evaluation with these flags."""
    assert main(["tokenizer", "save", str(tmp_path / "tokenizer")]) == 0

    def run(*flags: str) -> list[dict[str, Any]]:
        client = ("--client.base-url", f"{server.url}/v1", "--client.api-key-var", "NOBODY")
        command = ("vf-eval", "two_turns", "-m", "base", *client, *HARNESS, *ROLLOUTS, *flags)
        output = ("--output-dir", str(tmp_path), "--run.dir", "run", "--no-push", "--no-rich")
        variables = {"PYTHONPATH": str(ENVIRONMENT), "HF_HUB_OFFLINE": "1"}
        printed(*UV, "tool", "run", *PYTHON, *PACKAGES, *command, *output, at=ENVIRONMENT, **variables)
        lines = (tmp_path / "run" / "traces.jsonl").read_text().splitlines()
        return [trace for line in lines for trace in json.loads(line)["traces"]]

    return run


def answers(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [node for node in trace["nodes"] if node.get("sampled")]


def test_the_eval_client(play: Play) -> None:
    traces = play("--client.type", "eval")
    assert [len(answers(trace)) for trace in traces] == [2] * 4
    assert not any(trace["errors"] for trace in traces)


def test_each_turn_extends_the_tokens_of_the_one_before(play: Play, tmp_path: Path) -> None:
    """The trace of a rollout is one path, whose tokens are what the server was asked and what it drew."""
    renderer = ("--client.renderer.name", "custom", "--client.renderer.import-path", "chatml.py:ChatMLRenderer")
    folder = str(tmp_path / "tokenizer")
    traces = play("--client.type", "train", "--client.renderer-model-name", folder, *renderer)
    assert len(traces) == 4
    for trace in traces:
        nodes = trace["nodes"]
        assert not trace["errors"]
        assert [node.get("parent") for node in nodes] == [None, *range(len(nodes) - 1)], "no branch began anew"
        assert len(answers(trace)) == 2
        for node in answers(trace):
            assert sum(node["mask"]) == len(node["logprobs"]) > 0
            assert all(logprob <= 0 for logprob in node["logprobs"])
