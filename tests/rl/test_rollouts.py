"""Rollouts that no client asks for: what they ask of the engine, and what ends them."""

from __future__ import annotations

import threading
import time
from itertools import count
from types import SimpleNamespace

import pytest
from rl.rollout_rig import LIVE, Tokenizer, last_message, rig, text_of

from mlx_parallm.config import Config, RLTrainingConfig
from mlx_parallm.core.requests import CollectionSpec, GenerationRequest, WorkClass
from mlx_parallm.errors import ContextLengthError, EngineDeadError, StepFailedError, TrainingFailedError
from mlx_parallm.rl.environments import Task
from mlx_parallm.rl.rollouts.answers import NoTaskYetError, RolloutResult
from mlx_parallm.rl.rollouts.environment import EnvironmentRollouts


class Numbers:
    """Task 0 says `0?`, and so on. The tasks after `last` cannot be made."""

    def __init__(self, last: float = 99) -> None:
        self.last = last

    def tasks(self, seed: int):
        for number in count():
            if number > self.last:
                raise KeyError("column")
            message = {"role": "user", "content": f"{number}?"}
            yield Task((message,), CollectionSpec("exact", {"answer": str(number)}))


def yes(request: GenerationRequest) -> str:
    return "y"


async def test_each_task_becomes_one_collected_group_of_class_training() -> None:
    def leased(request: GenerationRequest) -> str:
        assert world.leases.held > 0, "the version is leased while it samples"
        return "y"

    async with rig(Numbers(), leased, group_size=4, temperature=0.8) as world:
        assert await world.draw(3) == RolloutResult(12)
        assert await world.draw(1) == RolloutResult(4)
    requests = world.engine.requests
    assert [text_of(prompt) for request in requests for prompt in request.prompts] == [
        f"<user>{number}?\0\n<assistant>" for number in range(4)
    ]
    assert [request.collection.metadata["answer"] for request in requests] == ["0", "1", "2", "3"]
    for request in requests:
        assert (request.n, request.adapter, request.work_class) == (4, LIVE, WorkClass.TRAINING)
        assert (request.sampling.temperature, request.stopping.max_tokens) == (0.8, 9)
    assert len({request.request_id for request in requests}) == 4
    assert world.ended == dict.fromkeys(range(4), 4)
    assert world.leases.held == 0


async def test_no_two_samples_of_any_runs_share_a_seed() -> None:
    seeds: list[int] = []
    for seed in (0, 1, 2**20):
        async with rig(Numbers(), yes, group_size=4, seed=seed) as world:
            await world.draw(50)
        seeds += [request.sampling.seed + at for request in world.engine.requests for at in range(request.n)]
    assert len(set(seeds)) == len(seeds) == 3 * 50 * 4


async def test_a_run_that_goes_on_samples_what_it_would_have_sampled_without_a_stop() -> None:
    async def asked(groups: int, **settings: object) -> list[tuple[object, ...]]:
        async with rig(Numbers(), yes, **settings) as world:
            await world.draw(groups)
        assert world.rollouts.taken == 6
        return [(each.request_id, each.prompts, each.sampling.seed) for each in world.engine.requests]

    whole = await asked(6, run="a")
    assert await asked(2, run="a", taken=4) == whole[4:]
    names = {name for name, _, _ in whole}
    assert len(names) == 6
    assert names.isdisjoint(name for name, _, _ in await asked(6, run="b")), "another run"


@pytest.mark.parametrize("error", [ContextLengthError("too long"), StepFailedError("out of memory")])
async def test_a_task_that_fails_costs_itself_only(error: Exception) -> None:
    def answer(request: GenerationRequest) -> str:
        if last_message(request) == "1?":
            raise error
        return "y"

    async with rig(Numbers(last=4), answer, group_size=4) as world:
        assert await world.draw(3) == RolloutResult(8, (f"task 1: {error}",))
        assert world.ended == {0: 4, 2: 4}
        assert world.leases.held == 0
        with pytest.raises(TrainingFailedError, match="no more tasks after it raised: 'column'"):
            await world.draw(4)


async def test_a_task_that_comes_too_late_is_the_next_one_and_none_is_lost() -> None:
    comes = threading.Event()

    class Stalling(Numbers):
        def tasks(self, seed: int):
            for number, task in enumerate(super().tasks(seed)):
                if number == 1:
                    comes.wait(20)
                yield task

    async with rig(Stalling(), lambda _: "y", timeout_s=0.1) as world:
        await world.draw()
        for _ in range(2):
            with pytest.raises(NoTaskYetError, match=r"no task within 0\.1 s"):
                await world.draw()
        comes.set()
        await world.draw()
        await world.draw()
    assert [last_message(request) for request in world.engine.requests] == ["0?", "1?", "2?"]
    assert world.ended == {0: 2, 1: 2, 2: 2}, "they have the numbers that they have without the stall"


async def test_a_dead_engine_ends_the_rollouts() -> None:
    def dies(request: GenerationRequest) -> str:
        raise EngineDeadError("the device thread has stopped")

    async with rig(Numbers(), dies) as world:
        with pytest.raises(EngineDeadError):
            await world.draw(2)


async def test_tasks_of_earlier_processes_take_none_of_the_time_for_the_next() -> None:
    class Slow(Numbers):
        def tasks(self, seed: int):
            for task in super().tasks(seed):
                time.sleep(0.02)
                yield task

    config = Config(rl_training=RLTrainingConfig(rollout_timeout_s=0.2))
    service = SimpleNamespace(parts=SimpleNamespace(held_out=(), adapters=None))
    for source in (Slow(), Slow(last=29)):
        rollouts = EnvironmentRollouts(config, service, Tokenizer(), "r", source, 2)
        await rollouts.open(30)
        if source.last > 30:
            (task,) = (await rollouts.take(1)).tasks
            assert task.messages[0]["content"] == "30?"
            assert rollouts.taken == 31
        else:
            (fault,) = (await rollouts.take(1)).tasks
            assert isinstance(fault, KeyError)
