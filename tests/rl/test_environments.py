"""Environments by name: endless tasks that depend on the seed alone."""

from __future__ import annotations

import json
import sys
from itertools import islice

import pytest
from rl.user_package import install

from mlx_parallm.errors import ConfigError
from mlx_parallm.rl.environments import GROUP, environment
from mlx_parallm.rl.scoring.sample import ScorerInput
from mlx_parallm.rl.scoring.scorers import load

NAME = "reasoning_gym:chain_sum"


def questions(name, seed, count):
    return [task.messages[0]["content"] for task in islice(environment(name).tasks(seed), count)]


def test_a_task_of_reasoning_gym_poses_questions_and_says_how_they_are_scored():
    for task in islice(environment(NAME).tasks(0), 3):
        (message,) = task.messages
        entry = task.collection.metadata["entry"]
        assert message == {"role": "user", "content": entry["question"]}
        assert task.collection.scorer == NAME
        scorer = load(NAME)
        assert scorer([ScorerInput(entry["answer"], 9, 3, "stop", task.collection.metadata)]) == [1]
        assert scorer([ScorerInput("no idea", 9, 3, "stop", task.collection.metadata)])[0] < 0.5
        assert json.loads(json.dumps(entry)) == entry


def test_equal_seeds_give_equal_tasks_and_others_share_none():
    assert questions(NAME, 5, 60) == questions(NAME, 5, 60)
    seen = [set(questions(NAME, seed, 60)) for seed in range(4)]
    assert len(set.union(*seen)) == sum(map(len, seen))


SOURCE = """
from mlx_parallm.core.requests import (CollectionSpec)
from mlx_parallm.rl.environments import Task

class Capitals:
    def tasks(self, seed):
        while True:
            yield Task(({"role": "user", "content": f"Capital {seed}?"},), CollectionSpec("exact", {"answer": "Paris"}))

capitals = Capitals()
class Sync(Capitals):
    def rollout(self, client, task):
        return 1.0
sync = Sync()
nothing = 3
class Fails:
    def __init__(self):
        raise RuntimeError("no data")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    install(
        tmp_path,
        "user_env",
        SOURCE,
        GROUP,
        "capitals",
        "capitals-class=Capitals",
        "nothing",
        "fails=Fails",
        "gone",
        "sync",
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("user_env", None)


@pytest.mark.parametrize("name", ["capitals", "capitals-class"])
def test_a_users_package_adds_environments(package, name):
    task = next(environment(name).tasks(7))
    assert task.messages[0]["content"] == "Capital 7?"
    assert task.collection.metadata["answer"] == "Paris"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "has no method tasks"),
        ("sync", "rollout must be a method `async def rollout"),
        ("wordz", "did you mean words"),
        ("gone.py:Capitals", "cannot be loaded: there is no file .*gone.py"),
        ("fails", "cannot be loaded: no data"),
        ("gone", "cannot be loaded"),
        ("capitols", "did you mean capitals"),
        ("reasoning_gym:chain_sun", "did you mean reasoning_gym:chain_sum"),
        ("reasoning_gym:", "unknown"),
        ("zzzzzz", r"there are FILE\.jsonl .*, capitals, .*reasoning_gym:<task>"),
    ],
)
def test_names_that_give_no_environment_are_refused(package, name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        environment(name)
    assert str(caught.value).startswith("environment: ")


@pytest.mark.parametrize(
    ("name", "message"),
    [("Nowhere", "own.py has no 'Nowhere'"), ("broken", r"own_broken.py:1: ZeroDivisionError"), ("Capitals", "")],
)
def test_a_file_has_environments(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE)
    (tmp_path / "own_broken.py").write_text("1 / 0")
    reference = "own_broken.py:Any" if name == "broken" else f"own.py:{name}"
    if message:
        with pytest.raises(ConfigError, match=message):
            environment(reference)
    else:
        assert next(environment(reference).tasks(7)).messages[0]["content"] == "Capital 7?"


def test_without_reasoning_gym_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="uv sync --inexact --extra reasoning-gym"):
        environment(NAME)
