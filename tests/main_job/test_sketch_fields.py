"""Request fields of the first sketch, on a server with a tiny model: `adapters` as a folder, and answers of tasks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lora import layout_of, random_adapter
from main_job.serving import Server, in_thread
from tiny import save_tiny, tiny_model

from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.cli.main import serve

PROMPT = [5, 6, 7]
GROUP = 2
MATH = {"environment": "math", "difficulty": "hard"}
"""The metadata of the sketch's own line, which has no answer."""
TASKS = (
    {"id": "sum", "prompt": "2 + 2 =", "answer": "4"},
    {"question": "How many legs have 3 dogs?", "answer": "3 dogs have 3 * 4 = <<3*4=12>>12 legs.\n#### 12"},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, a file of tasks, and an adapter inside and one outside of the allowed root."""
    made = tmp_path_factory.mktemp("sketch")
    save_tiny("llama", made / "model")
    layout = layout_of(tiny_model("llama"))
    for seed, name in enumerate(("roots/tone", "outside")):
        write_mlx_lm(made / name, random_adapter(layout, seed, size=0.5), layout)
    (made / "tasks.jsonl").write_text("\n".join(map(json.dumps, TASKS)))
    return made


def flags(folder: Path, environment: str) -> tuple[str, ...]:
    files = ("--model-path", str(folder / "model"), "--checkpoint-dir", str(folder / "checkpoints"))
    return (*files, "--enable-rl-training", "--environment", environment, "--no-server-rollouts")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    roots = ("--allowed-adapter-roots", str(folder / "roots"))
    with in_thread(*flags(folder, str(folder / "tasks.jsonl")), *roots) as running:
        yield running


# ---- adapters as a folder ------------------------------------------------------------------------


def ask(server: Server, **fields: Any) -> Any:
    return server.post("/v1/completions", prompt=PROMPT, max_tokens=6, temperature=0, ignore_eos=True, **fields)


def test_adapters_may_be_a_folder_under_an_allowed_root(server: Server, folder: Path) -> None:
    plain = ask(server)
    tuned = ask(server, adapters=str(folder / "roots" / "tone"))
    name = tuned["lora_adapter"].removesuffix("@1")
    assert name.startswith("tone.")
    assert tuned["choices"][0]["text"] != plain["choices"][0]["text"]
    for again in ({"adapters": "./tone"}, {"adapters": name}, {"lora_adapter": name}):
        assert ask(server, **again)["choices"] == tuned["choices"]
    assert [card["id"] for card in server.get("/v1/adapters")["data"]] == [f"{name}@1"]


# ---- answers of tasks ----------------------------------------------------------------------------


def collected(server: Server, path: str = "/v1/completions", **body: Any) -> tuple[str, list[dict[str, Any]]]:
    """The warning of a collected request, and its trajectories once they have their rewards, if they get any."""
    asked = {"max_tokens": 4, "n": GROUP, "collect_trajectory": True, "scoring_function": "gsm8k", **body}
    answer = server.post(path, **asked)
    warning = answer.get("trajectory_warning", "")
    while True:
        cards = [
            card
            for card in server.get("/debug/trajectories")["data"]
            if card["trajectory_id"] in answer["trajectory_ids"]
        ]
        if warning or all(card["state"] != "waiting" for card in cards):
            return warning, cards
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("/v1/completions", {"prompt": "2 + 2 =", "metadata": MATH}, "4"),
        ("/v1/completions", {"prompt": PROMPT, "metadata": {**MATH, "problem_id": "sum"}}, "4"),
        ("/v1/completions", {"prompt": "2 + 2 =", "metadata": {"answer": "5"}}, "5"),
        ("/v1/completions", {"prompt": "2 + 2 =", "metadata": MATH, "scoring_function": "0.5*exact + 0.5*math"}, "4"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TASKS[1]["question"]}]}, "12"),
    ],
)
def test_the_answer_that_metadata_lacks_is_that_of_the_task(
    server: Server, path: str, body: dict[str, Any], wanted: str
) -> None:
    warning, cards = collected(server, path, **body)
    assert warning == ""
    assert [card["metadata"]["answer"] for card in cards] == [wanted] * GROUP
    assert [card["reward"] for card in cards] == [0.0] * GROUP, "a random model, scored and found wrong"


@pytest.mark.parametrize("body", [{"prompt": "9 + 9 ="}, {"prompt": ["2 + 2 =", "2 + 2 ="]}])
def test_without_a_task_it_waits_for_feedback_and_the_answer_says_so(server: Server, body: dict[str, Any]) -> None:
    warning, cards = collected(server, **body, metadata={**MATH, "problem_id": "unknown"})
    assert "neither metadata nor a task of the server has an answer for gsm8k" in warning.lower()
    assert {card["state"] for card in cards} == {"waiting"}
    server.post("/v1/training/feedback", trajectory_id=cards[0]["trajectory_id"], score=1.0)


def test_an_environment_that_gives_no_tasks_ends_the_server_at_its_start(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve([*flags(folder, "gsm8k"), "--checkpoint-dir", str(tmp_path)]) == 2
    assert "FILE.jsonl (such as gsm8k's train.jsonl)" in capsys.readouterr().err
