"""`mlx_parallm_train` on environments with rollouts of their own, on a tiny model."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from training_runs import GROUP, PROMPTS, View, config

from mlx_parallm.adapters.runs import JOURNAL
from mlx_parallm.app.train import run
from mlx_parallm.app.training_run import WARM_UP, TrainOptions
from mlx_parallm.rl.runs.records import Update
from mlx_parallm.rl.runs.store import JournalFile

pytestmark = pytest.mark.ci

SOURCE = """
import itertools

from mlx_parallm.core.requests import (CollectionSpec)
from mlx_parallm.rl.environments import Task


class Turns:
    def tasks(self, seed):
        for number in itertools.count():
            yield Task(({"role": "user", "content": f"{seed} {number}"},), CollectionSpec())

    def examples(self, seed):
        while True:
            yield ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})

    async def rollout(self, client, task):
        first = await client.ask(task.messages)
        if "0" in task.messages[0]["content"][2:] and first.token_ids[0] % 2:
            raise RuntimeError("no tool")
        second = await client.ask([*task.messages, first.message, {"role": "user", "content": "and?"}])
        return float(sum(first.token_ids + second.token_ids) % 7)
"""


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    (tmp_path / "own.py").write_text(SOURCE)
    return TrainOptions(f"{tmp_path}/own.py:Turns", 3, GROUP, PROMPTS)


def asked(tmp_path: Path, options: TrainOptions, **keys: object):
    return config(
        tmp_path,
        "grpo",
        checkpointing__checkpoint_dir=tmp_path / "kept",
        rl_training__environment=options.environment,
        **keys,
    )


@pytest.mark.timeout(120)
def test_episodes_are_drawn_rewarded_and_trained_on(tmp_path: Path, options: TrainOptions) -> None:
    view = View()
    assert run(asked(tmp_path, options), options, view) == 0
    assert [report.status for report in view.reports] == ["published"] * 3
    for report in view.reports:
        assert report.metrics["turns"] == 2
        assert 0 <= report.metrics["reward_mean"] <= 6
        assert report.metrics["staleness"] == 0
    for failure in view.failures:
        assert "RuntimeError: no tool" in failure


@pytest.mark.timeout(120)
def test_a_warm_up_comes_once_however_often_the_run_is_stopped(tmp_path: Path, options: TrainOptions) -> None:
    """12 examples are two updates, four times; then three steps. The second process makes only what is left."""
    options = replace(options, warm_up=12)
    view = View(then=lambda view: os.kill(os.getpid(), signal.SIGINT))
    assert run(asked(tmp_path, options), options, view) == 128 + signal.SIGINT
    assert [report.step for report in view.reports] == [9]
    view = View()
    assert run(asked(tmp_path, options), options, view) == 0
    assert (view.made, [report.step for report in view.reports]) == (1, [10, 11])
    file = JournalFile(next((tmp_path / "kept").rglob(JOURNAL)))
    updates = [change.body for change in file.changes_since("default", 0) if isinstance(change.body, Update)]
    file.close()
    assert [update.progress.get(WARM_UP) for update in updates] == [*range(1, 9), 8, 8, 8]


@pytest.mark.timeout(120)
def test_held_out_tasks_are_played_by_the_environment(tmp_path: Path, options: TrainOptions) -> None:
    """The base model gets the same mean in every run."""
    keys = {"rl_training__evaluation__every": 1, "rl_training__evaluation__size": 6}
    firsts = []
    for name in ("first", "again"):
        settings, view = asked(tmp_path, options, **keys), View()
        checkpointing = settings.checkpointing.model_copy(update={"checkpoint_dir": tmp_path / name})
        assert run(settings.model_copy(update={"checkpointing": checkpointing}), replace(options, steps=1), view) == 0
        assert view.first.answers + view.first.failed == 6
        assert view.first.answers >= 5, "only the task with a 0 can fail"
        assert view.first.mean > 1, "no scoring function gives that"
        assert view.first.low <= view.first.mean <= view.first.high
        (report,) = view.reports
        assert report.metrics["eval_answers"] + report.metrics["eval_failed"] == 6
        firsts.append((view.first.mean, view.first.answers, view.first.failed))
    assert firsts[0] == firsts[1]
