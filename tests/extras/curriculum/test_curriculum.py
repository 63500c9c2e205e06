"""`mlx_parallm_train` with a curriculum, on a tiny model and a file of tasks with levels."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from training_runs import View, config

from mlx_parallm.app.train import run
from mlx_parallm.app.training_run import TrainOptions
from mlx_parallm.cli.train_view import level_lines

pytestmark = pytest.mark.ci

GROUP, PROMPTS = 4, 3
PATTERNS = {"sure": "", "even": "^[ -O]", "never": "^never$"}
"""By level: what an answer must contain. A tiny model writes anything."""


def options_of(folder: Path, steps: int) -> TrainOptions:
    file = folder / "tasks.jsonl"
    tasks = [
        {
            "prompt": f"{level} {number}",
            "answer": pattern or "(?:)",
            "scoring_function": "math",
            "level": level,
            "task": f"{level} {number}",
        }
        for number in range(40)
        for level, pattern in PATTERNS.items()
    ]
    file.write_text("\n".join(map(json.dumps, tasks)))
    return TrainOptions(str(file), steps, GROUP, PROMPTS)


REWARD = """
import re
PATTERNS = {PATTERNS!r}

def score(sample):
    return float(re.search(PATTERNS[sample.metadata["level"]], sample.text) is not None)
"""


def settings(folder: Path, kept: str, **keys: object):
    (folder / "rewards.py").write_text(REWARD.format(PATTERNS=PATTERNS))
    return config(
        folder,
        "grpo",
        rl_training__environment=str(folder / "tasks.jsonl"),
        rl_training__reward=f"{folder / 'rewards.py'}:score",
        rl_training__trajectory_log=folder / f"{kept}.jsonl",
        checkpointing__checkpoint_dir=folder / kept,
        **{"rl_training__curriculum__enabled": True, **keys},
    )


def prompts_in(log: Path) -> list[str]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    by_task = {int(line["group_id"].split("-")[3]): line["metadata"]["task"] for line in lines}
    return [by_task[number] for number in sorted(by_task)]


@pytest.mark.timeout(180)
def test_tasks_are_drawn_by_success_and_a_run_that_is_stopped_draws_the_same(tmp_path: Path) -> None:
    options, view = options_of(tmp_path, 12), View()
    assert run(settings(tmp_path, "one"), options, view) == 0
    last = view.reports[-1].metrics
    assert last["curriculum/sure/success"] > 0.6 > 0.4 > last["curriculum/never/success"]
    assert last["curriculum/even/share"] > 1 / 3 > last["curriculum/never/share"]
    levels = [prompt.split()[0] for prompt in prompts_in(tmp_path / "one.jsonl")]
    assert len(levels) == 12 * PROMPTS
    assert {level: levels.count(level) for level in PATTERNS} == {
        level: last[f"curriculum/{level}/drawn"] for level in PATTERNS
    }
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["curriculum/even/share"] == last["curriculum/even/share"]

    def stop(view: View) -> None:
        if view.reports[-1].step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    assert run(settings(tmp_path, "two"), options, View(then=stop)) == 128 + signal.SIGINT
    went_on = View()
    assert run(settings(tmp_path, "two", checkpointing__resume=True), options, went_on) == 0
    assert prompts_in(tmp_path / "two.jsonl") == prompts_in(tmp_path / "one.jsonl")
    for name, value in last.items():
        if name.startswith("curriculum/"):
            assert went_on.reports[-1].metrics[name] == value, name


@pytest.mark.timeout(120)
def test_the_lines_of_a_run_name_each_level(tmp_path: Path) -> None:
    view = View()
    assert run(settings(tmp_path, "one"), options_of(tmp_path, 1), view) == 0
    lines = level_lines(view.reports[0])
    assert sorted(line.split()[1] for line in lines) == sorted(PATTERNS)
    assert all(re.fullmatch(r"level \w+ +success [\d.]+, \d+% of the tasks", line) for line in lines)
