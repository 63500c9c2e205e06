"""`mlx_parallm_train` on an own task: a file of tasks and a file with a reward function."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from training_runs import GROUP, PROMPTS, View, config

from mlx_parallm.app.train import run
from mlx_parallm.app.training_run import TrainOptions
from mlx_parallm.config import Config
from mlx_parallm.errors import ConfigError

pytestmark = pytest.mark.ci

REWARDS = """
def score(prompts, completions, wanted, **kwargs):
    assert isinstance(prompts[0], str) == isinstance(completions[0], str)
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    if wanted[0] == "?":
        raise ValueError("nothing is wanted")
    return [sum(letter < wanted[0] for letter in text) / 100 for text in texts]

async def one(sample):
    return float(len(sample.prompt_ids) > 0 and len(sample.completion_ids) > 0)
"""


@pytest.fixture
def two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Writes rewards.py and tasks.jsonl to the working folder, and makes the configuration that names them."""
    monkeypatch.chdir(tmp_path)

    def make(*wanted: str, reward: str = "rewards.py:score", **keys: object) -> Config:
        (tmp_path / "rewards.py").write_text(REWARDS)
        rows: list[dict[str, object]] = [{"prompt": f"Task {n}", "wanted": letter} for n, letter in enumerate(wanted)]
        rows[0] = {"messages": [{"role": "user", "content": "Task 0"}], "wanted": wanted[0]}
        (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
        log = {"rl_training__trajectory_log": tmp_path / "log.jsonl"}
        return config(tmp_path, "grpo", rl_training__reward=reward, **log, **keys)

    return make


@pytest.mark.timeout(120)
def test_tasks_and_a_reward_function_in_two_files_are_trained_on(tmp_path: Path, two_files) -> None:
    settings, view = two_files("M", "P", reward="2*rewards.py:score + 1*rewards.py:one"), View()
    assert run(settings, TrainOptions("tasks.jsonl", 2, GROUP, PROMPTS), view) == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * GROUP * PROMPTS
    for line in lines:
        assert line["scoring_function"] == "reward"
        below = sum(letter < line["metadata"]["wanted"] for letter in line["text"])
        assert line["reward"] == pytest.approx(1 + 2 * below / 100)
    assert {line["metadata"]["wanted"] for line in lines} == {"M", "P"}
    assert len({line["reward"] for line in lines}) > 2
    assert view.facts["reward"] == "2*rewards.py:score + 1*rewards.py:one"


@pytest.mark.timeout(120)
def test_held_out_tasks_are_scored_by_the_same_reward(two_files) -> None:
    held_out = {"rl_training__evaluation__every": 1, "rl_training__evaluation__size": 2}
    held_out |= {"rl_training__environment": "tasks.jsonl"}
    settings, view = two_files("M", "P", "~", "~", reward="rewards.py:one", **held_out), View()
    assert run(settings, TrainOptions("tasks.jsonl", 1, GROUP, PROMPTS), view) == 0
    assert (view.first.answers, view.first.mean) == (2, 1.0)


@pytest.mark.timeout(120)
def test_a_reward_that_raises_costs_its_group_and_says_where(tmp_path: Path, two_files) -> None:
    view = View()
    assert run(two_files("M", "?"), TrainOptions("tasks.jsonl", 2, GROUP, PROMPTS), view) == 0
    why = "a task's answers could not be scored: reward: rewards.py:6: ValueError: nothing is wanted"
    assert view.failures == [why, why]
    assert [report.metrics["failed_tasks"] for report in view.reports] == [1, 1]
    assert {report.status for report in view.reports} == {"published"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("rewards.py:scor", r"reward: .* rewards\.py has no function scor; did you mean score\?"),
        ("reward.py:score", r"reward: .* there is no file .*/reward\.py"),
        ("rewards.py", r"reward: 'rewards\.py' cannot be read: give FILE\.py:NAME"),
        ("0.5*judge + 0.5*exact", r"rl_training\.judge\.url: a judge needs a server, .*--judge-url and --judge-model"),
    ],
)
def test_a_reward_that_cannot_be_used_is_told_before_the_model_is_loaded(two_files, reward: str, message: str) -> None:
    settings = two_files("M", reward=reward)
    absent = settings.model_copy(update={"model": settings.model.model_copy(update={"base_model_path": "/no model"})})
    with pytest.raises(ConfigError, match=message):
        run(absent, TrainOptions("tasks.jsonl", 1, GROUP, PROMPTS), View())
