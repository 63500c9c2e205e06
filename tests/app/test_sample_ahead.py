"""Rollouts of the next step are sampled while those of this one wait, on a tiny model and with a slow reward."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from training_runs import GROUP, PROMPTS, View, config

from mlx_parallm.adapters.runs import JOURNAL
from mlx_parallm.app.train import run
from mlx_parallm.app.training_run import STEPS, TASKS, TrainOptions
from mlx_parallm.config import Config
from mlx_parallm.rl.runs.records import Update
from mlx_parallm.rl.runs.store import JournalFile

pytestmark = pytest.mark.ci

SOURCE = """
import asyncio, itertools, time

from mlx_parallm.core.requests import (CollectionSpec)
from mlx_parallm.rl.environments import Task


def slow(completions, completion_ids, **_):
    time.sleep(0.8)
    return [float(sum(ids) % 7) for ids in completion_ids]


class Numbers:
    def tasks(self, seed):
        for number in itertools.count():
            level = "odd" if number % 2 else "even"
            spec = CollectionSpec(metadata={"level": level})
            yield Task(({"role": "user", "content": f"{seed} {number}"},), spec, level)


class Tool(Numbers):
    "Its tool takes a while."

    async def rollout(self, client, task):
        first = await client.ask(task.messages)
        await asyncio.sleep(0.8)
        second = await client.ask([*task.messages, first.message, {"role": "user", "content": "and?"}])
        return float(sum(first.token_ids + second.token_ids) % 7)
"""


def asked(folder: Path, name: str = "Numbers", **keys: object) -> Config:
    (folder / "own.py").write_text(SOURCE)
    reward = {} if name == "Tool" else {"rl_training__reward": f"{folder}/own.py:slow"}
    settings = {
        "checkpointing__checkpoint_dir": folder / "kept",
        "rl_training__environment": f"{folder}/own.py:{name}",
        "rl_training__trajectory_log": folder / "log.jsonl",
        "rl_training__draw_ahead_after_s": 0.1,
        **reward,
    }
    return config(folder, "grpo", **{**settings, **keys})


def options(folder: Path, steps: int, name: str = "Numbers") -> TrainOptions:
    return TrainOptions(f"{folder}/own.py:{name}", steps, GROUP, PROMPTS)


def updates_in(folder: Path) -> list[Update]:
    file = JournalFile(next((folder / "kept").rglob(JOURNAL)), read_only=True)
    try:
        return [change.body for change in file.changes_since("default", 0) if isinstance(change.body, Update)]
    finally:
        file.close()


def tasks_of(update: Update) -> set[int]:
    """The tasks whose groups the update has seen, with a signal or without."""
    return {
        int(name.split("-")[3]) for group in update.groups for each in group.episodes for name in each.trajectory_ids
    }


def assert_each_task_counts_once(folder: Path, steps: int) -> None:
    """Every update has the tasks that follow those of the one before, and says so for a restart."""
    updates = updates_in(folder)
    assert [update.progress[STEPS] for update in updates] == [*range(1, steps + 1)]
    taken = 0
    for update in updates:
        assert tasks_of(update) == set(range(taken, taken + PROMPTS))
        taken += PROMPTS
        assert update.progress[TASKS] == taken


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["Numbers", "Tool"])
def test_the_next_step_is_sampled_by_the_version_before(tmp_path: Path, name: str) -> None:
    view = View()
    assert run(asked(tmp_path, name), options(tmp_path, 6, name), view) == 0
    assert_each_task_counts_once(tmp_path, 6)
    staleness = [max(group.staleness for group in update.groups) for update in updates_in(tmp_path)]
    assert staleness[0] == 0, "nothing was sampled before the first step"
    assert set(staleness) == {0, 1}
    for sampled, wanted in view.rollouts:
        assert 0 <= sampled <= wanted == PROMPTS * GROUP
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert set(Counter(line["trajectory_id"] for line in log).values()) == {1}


@pytest.mark.timeout(300)
def test_without_the_setting_drawing_and_waiting_take_turns(tmp_path: Path) -> None:
    settings = asked(tmp_path, rl_training__draw_ahead_after_s=None)
    assert run(settings, options(tmp_path, 4), View()) == 0
    assert [max(group.staleness for group in update.groups) for update in updates_in(tmp_path)] == [0] * 4


_CHILD = """
import os, signal, sys, threading
from pathlib import Path
from app.test_sample_ahead import asked, options
from training_runs import View
from mlx_parallm.app.train import run

def then(view):
    if view.reports[-1].step == 3:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()

path = Path(sys.argv[1])
sys.exit(run(asked(path), options(path, 6), View(then=then)))
"""


@pytest.mark.timeout(300)
def test_a_run_that_is_killed_goes_on_with_the_tasks_that_no_update_has(tmp_path: Path) -> None:
    asked(tmp_path)  # makes the model
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = [sys.executable, "-c", _CHILD, str(tmp_path)]
    assert subprocess.run(child, env=environment, timeout=200, check=False).returncode == -signal.SIGKILL
    made = len(updates_in(tmp_path))
    assert 3 <= made < 6
    view = View()
    assert run(asked(tmp_path), options(tmp_path, 6), view) == 0
    assert view.made == made
    assert_each_task_counts_once(tmp_path, 6)
    trained = [name for update in updates_in(tmp_path) for name in update.trajectory_ids]
    assert set(Counter(trained).values()) == {1}
