"""Environments of verifiers: which are played, and what is refused.

verifiers is not in the development group; these tests have a fake of it.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from itertools import islice
from types import ModuleType, SimpleNamespace

import pytest
from extras.verifiers.fake_verifiers import Box, DockerConfig, Env, Taskset, install

from mlx_parallm.errors import ConfigError
from mlx_parallm.rl.environments import RolloutError, answers_of, environment
from mlx_parallm.rl.environments.thread import EnvironmentThread

AGENT = Env.agents["agent"]


@pytest.fixture
def add(monkeypatch):
    """Installs an environment as the module `quiz`, and returns it by its name."""
    install(monkeypatch)

    def put(**attributes):
        module = ModuleType("quiz")
        module.Environment = type("Environment", (Env,), attributes)
        monkeypatch.setitem(sys.modules, "quiz", module)
        return environment("verifiers:quiz")

    return put


def prompts(tasks, count):
    return [task.messages[-1]["content"] for task in islice(tasks, count)]


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("mlx_parallm.optional_packages.Extra.installed", False)
    with pytest.raises(ConfigError, match=r"verifiers is not installed.*mlx-parallm\[verifiers\]"):
        environment("verifiers:quiz")


def test_the_answers_of_its_tasks_are_not_looked_up_and_it_is_not_loaded():
    assert not answers_of("verifiers:nobody").rows


def test_an_unknown_environment_and_one_that_cannot_be_imported_are_told_apart(monkeypatch, tmp_path):
    install(monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    for name, source in {"needs": "import nowhere", "breaks": "1 / 0"}.items():
        (tmp_path / f"vf_{name}.py").write_text(source)
    for name, reason in {
        "": "name one of verifiers",
        "vf-absent": "'verifiers:vf-absent' is unknown: there is no module 'vf_absent'",
        "vf-needs": "verifiers:vf-needs cannot be imported: No module named 'nowhere'",
        "vf-breaks": "verifiers:vf-breaks cannot be imported: division by zero",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            environment(f"verifiers:{name}")


def test_every_task_comes_once_before_any_comes_again(add):
    quiz = add()
    first = prompts(quiz.tasks(1), 6)
    assert first == prompts(quiz.tasks(1), 6)
    assert {*first[:3]} == {*first[3:]} == {"a?", "b?", "c?"}
    assert {tuple(prompts(quiz.tasks(seed), 3)) for seed in range(9)} > {tuple(first[:3])}


class Server:
    """The interception of an environment that is served."""


@pytest.mark.parametrize("fault", [SystemExit(3), asyncio.CancelledError(), OSError("no port")])
async def test_a_start_that_fails_costs_the_rollouts_that_wait_and_the_next_one_tries_again(add, fault):
    """A tool server that exits, or a start that is cancelled from within, leaves nobody waiting."""
    faults, thread = [fault], EnvironmentThread()

    @asynccontextmanager
    async def serving(self):
        await asyncio.sleep(0.01)
        if faults:
            raise faults.pop()
        yield

    quiz = add(serving=serving, _interception=Server())

    async def served():
        return type(await quiz._serving.environment())

    waiting = [thread.run(served, lambda: 10.0) for _ in range(2)]
    for error in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5.0):
        if isinstance(fault, OSError):
            assert error is fault
        else:
            assert isinstance(error, RolloutError)
            assert f"the environment did not start: {fault!r}" in str(error)
    assert (await asyncio.wait_for(thread.run(served, lambda: 10.0), 5.0)).__name__ == "Environment"
    thread.close()


SEEN = [SimpleNamespace(role="user", content=[SimpleNamespace(type="image_url")])]


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"taskset": Taskset(prompts=())}, "has no tasks"),
        ({"taskset": Taskset(fields={"image": "python:3"})}, "task 0 needs a container of the image python:3"),
        ({"taskset": Taskset(fields={"network_block": ("a.org",)})}, "limits on the network"),
        ({"taskset": Taskset(prompts=("a?", SEEN))}, "task 1 needs images"),
        ({"agents": {"agent": AGENT.model_copy({"runtime": DockerConfig()})}}, "runs agent in docker"),
        (
            {"agents": {"agent": AGENT.model_copy({"harness": Box(id="codex")})}},
            "the harness codex of agent lets the model run",
        ),
        ({"agents": {"solver": AGENT, "judge": AGENT}}, r"2 agents without a model of their own \(solver, judge\)"),
        ({"agents": {"agent": AGENT.model_copy({"model": "big"})}}, "its agent agent needs the model big"),
    ],
)
def test_what_an_environment_needs_and_is_not_given_is_named(add, attributes, reason):
    with pytest.raises(ConfigError, match=rf"^environment: verifiers:quiz.*{reason}"):
        add(**attributes)
