"""Environments of verifiers: which are played, what is refused, and what becomes of an episode.

verifiers is not in the development group; these tests have a fake of it.
"""

from __future__ import annotations

import sys
from itertools import islice
from types import ModuleType, SimpleNamespace

import pytest
from rl.fake_verifiers import Box, DockerConfig, Env, PrimeConfig, Taskset, install
from rl.rollout_rig import last_message, rig, text_of

from mlx_parallm.errors import ConfigError
from mlx_parallm.rl.environments import answers_of, environment

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


def test_the_tasks_of_an_endless_taskset_come_in_its_order(add):
    assert prompts(add(taskset=Taskset(bounded=False)).tasks(1), 3) == ["a?", "b?", "c?"]


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


def test_an_agent_with_a_client_of_its_own_may_play_too(add):
    judge = Box(client=Box(base_url="http://judge"), model="big", harness=None, runtime=PrimeConfig())
    assert prompts(add(agents={"agent": AGENT, "judge": judge}).tasks(0), 1)


async def test_an_episode_asks_the_adapter_in_training_and_gets_its_reward(add):
    quiz = add()
    async with rig(quiz, lambda request: "yes" if last_message(request) == "a?" else "no", group_size=2) as world:
        drawn = await world.draw(3)
        assert (drawn.failures, drawn.faults) == ((), ())
        rewards = {turns[0].collection.messages[-1]["content"]: {*by_id.values()} for turns, by_id in world.groups}
        assert rewards == {"a?": {1.0}, "b?": {0.0}, "c?": {0.0}}


async def test_tools_and_their_results_reach_the_model_and_calls_come_back(add):
    asked = []

    async def play(self, ask, task):
        tool = SimpleNamespace(type="function", namespace=None, name="add", description="Adds.", parameters={})
        question = SimpleNamespace(role="user", content=[SimpleNamespace(type="text", text="1 + 2?")])
        first = await ask([question], [tool], max_tokens=4)
        asked.append(first)
        (call,) = first.message.tool_calls
        said = SimpleNamespace(role="assistant", content=None, tool_calls=[call])
        result = SimpleNamespace(role="tool", content="3", tool_call_id=call.id, name="add")
        last = await ask([question, said, result], [tool])
        asked.append(last)
        return {"right": float(last.message.content == "3")}

    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    async with rig(add(play=play), lambda request: "3" if last_message(request) == "3" else call) as world:
        await world.draw()
        ((turns, rewards),) = world.groups
        assert {*rewards.values()} == {1.0}
        assert [answer.finish_reason for answer in asked[:2]].count("tool_calls") >= 1
        assert world.engine.requests[0].stopping.max_tokens == 4
        first, last = turns[0], turns[1]
        assert last.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        assert call in text_of(last.prompt_ids)
        assert last.collection.unmatched == ""


async def test_the_system_prompt_of_the_run_comes_before_a_task_without_one(add):
    seen = []

    async def play(self, ask, task):
        seen.append(task.data.system_prompt)
        return await Env.play(self, ask, task)

    async with rig(add(play=play), lambda request: "yes", system_prompt="Be brief.") as world:
        await world.draw()
        assert seen == ["Be brief."] * 2
    own = Taskset(fields={"system_prompt": "Mine."})
    async with rig(add(play=play, taskset=own), lambda request: "yes", system_prompt="Be brief.") as world:
        await world.draw()
        assert seen[2:] == ["Mine."] * 2


async def test_an_episode_that_fails_costs_itself(add):
    async def play(self, ask, task):
        if (await Env.play(self, ask, task))["right"]:
            return {"right": 1.0}
        raise KeyError("tool")

    answers = iter(["yes", "no", "yes"])
    async with rig(add(play=play), lambda request: next(answers), group_size=3) as world:
        drawn = await world.draw()
        ((_, rewards),) = world.groups
        assert [*rewards.values()] == [1.0, 1.0]
        assert drawn.faults == ("task 0: 1 of 3 episodes failed, the first with: KeyError: 'tool'",)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"runs": 2}, "ran its agent 2 times in one episode; it must be once"),
        ({"play": lambda self, ask, task: ask(SEEN)}, "shows the model an image; only text is supported"),
    ],
)
async def test_what_is_seen_only_in_an_episode_is_named_there(add, attributes, reason):
    async with rig(add(**attributes), lambda request: "yes") as world:
        (failure,) = (await world.draw()).failures
        assert reason in failure


async def test_an_episode_without_a_rubric_is_left_to_the_scorer(add):
    async def play(self, ask, task):
        await Env.play(self, ask, task)
        return {}

    async with rig(add(play=play), lambda request: "yes") as world:
        (failure,) = (await world.draw()).failures
        assert "the environment gave no reward" in failure
