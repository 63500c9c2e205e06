"""The examples: serve_and_train.py on a tiny model, and the two files of one_word."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from tiny import save_tiny

from mlx_parallm.rl.environments.files import read_tasks
from mlx_parallm.rl.scoring.own_functions import load_function
from mlx_parallm.rl.scoring.sample import ScorerInput

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "serve_and_train.py"


@pytest.mark.timeout(120)
def test_it_serves_and_trains_without_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny("llama", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "model"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    rounds = [re.match(r"(\S+) answers .*; reward (-\d\.\d\d), (\w+)", line) for line in printed]
    assert [found and found.group(1, 3) for found in rounds] == [
        ("base@0", "published"),
        *((f"default@{version}", "published") for version in range(1, 5)),
    ]


def test_the_rewards_of_one_word_fit_its_tasks(caplog: pytest.LogCaptureFixture) -> None:
    tasks = read_tasks(EXAMPLES / "one_word" / "tasks.jsonl", rewarded=True).rows
    assert (len(tasks), caplog.records) == (32, [])
    share, ended = (load_function(f"{EXAMPLES}/one_word/rewards.py:{name}") for name in ("share", "ended"))
    for task in tasks:
        texts = (
            task.collection.metadata["answer"],
            f"It was {task.collection.metadata['answer']}.",
            "Positive or negative.",
        )
        samples = [
            ScorerInput(text, 9, 3, "length", task.collection.metadata, task.collection.prompt_text) for text in texts
        ]
        assert list(share(samples)) == [1, pytest.approx(1 / 3), 0]
        assert list(ended(samples)) == [0, 0, 0]
