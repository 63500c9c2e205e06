"""Taking batches from Atropos' trajectory API: registered again when it was restarted, and nothing taken is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from run_api import RunApi, scored

from mlx_parallm.errors import StorageError
from mlx_parallm.extras.atropos.groups import GivenGroup
from mlx_parallm.extras.atropos.scored_data import TokenLimits
from mlx_parallm.extras.atropos.source import AtroposSource
from mlx_parallm.extras.atropos.trajectory_api import Registration, TrajectoryApi

REGISTRATION = Registration(4, 64, "/tmp/run", 10, 0, 100, "run", "mlx-parallm")
LIMITS = TokenLimits(64, 100)


class Training:
    """Keeps the groups that it is given. `errors`: raised first, one a call."""

    def __init__(self) -> None:
        self.groups: list[GivenGroup] = []
        self.errors: list[Exception] = []
        self.wanted = 100

    async def give(self, group: GivenGroup) -> None:
        if self.errors:
            raise self.errors.pop()
        self.groups.append(group)

    def has_enough(self) -> bool:
        return len(self.groups) >= self.wanted


@pytest.fixture
def api() -> Iterator[RunApi]:
    one = RunApi()
    yield one
    one.stop()


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.extras.atropos.source._EMPTY_PAUSE_S", 0.01)
    monkeypatch.setattr("mlx_parallm.extras.atropos.source._DOWN_PAUSE_S", 0.01)


@asynccontextmanager
async def taking(url: str, training: Training) -> AsyncIterator[AtroposSource]:
    source = AtroposSource(TrajectoryApi(url), REGISTRATION, LIMITS, training.give, training.has_enough)
    task = asyncio.create_task(source.run())
    try:
        yield source
    finally:
        task.cancel()
        await source.close()


async def until(true: Any) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.005)


async def test_it_registers_and_gives_every_group_of_every_batch(api: RunApi) -> None:
    api.batches = [[scored(env_id=1)], [scored(), scored(scores=[0.0, 1.0])]]
    training = Training()
    async with taking(api.url, training):
        await until(lambda: len(training.groups) == 3)
    assert api.registered == [
        {
            "batch_size": 4,
            "max_token_len": 64,
            "checkpoint_dir": "/tmp/run",
            "save_checkpoint_interval": 10,
            "starting_step": 0,
            "num_steps": 100,
            "wandb_group": "run",
            "wandb_project": "mlx-parallm",
        }
    ]
    assert [group.source for group in training.groups] == ["atropos", "atropos", "atropos:1"]
    assert [group.trajectories[0].reward for group in training.groups] == [1.0, 0.0, 1.0]
    assert len({group.group_id for group in training.groups}) == 3


async def test_it_registers_again_after_the_api_was_restarted(api: RunApi) -> None:
    training = Training()
    async with taking(api.url, training):
        await until(lambda: api.asked > 1)
        api.stop()
        await asyncio.sleep(0.05)
        again = RunApi(api.port)
        again.batches = [[scored()]]
        await until(lambda: len(training.groups) == 1)
    again.stop()
    assert len(again.registered) == 1


async def test_a_bad_group_costs_only_itself(api: RunApi, caplog: pytest.LogCaptureFixture) -> None:
    api.batches = [[scored(tokens=[[1, 2]]), "no group", scored()]]
    training = Training()
    async with taking(api.url, training) as source:
        await until(lambda: len(training.groups) == 1)
    assert (source.accepted, source.refused) == (1, 2)
    assert "masks: there are 2 for 1 sequences" in caplog.text


async def test_groups_wait_for_a_full_disk(api: RunApi) -> None:
    api.batches = [[scored()]]
    training = Training()
    training.errors = [StorageError("disk full"), StorageError("disk full")]
    async with taking(api.url, training):
        await until(lambda: len(training.groups) == 1)
