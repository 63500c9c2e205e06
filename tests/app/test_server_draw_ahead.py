"""How many groups a server draws by itself while those of its next update wait. Rollouts and service are made up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from configs import TRAINING, changed

from mlx_parallm.app.server_rollouts import ServerRollouts
from mlx_parallm.core import LevelCard
from mlx_parallm.rl.rollouts.answers import DrawResult

WANTED, SIZE = 4, 2


class World:
    """A server that is to draw groups. `drawing`: those that are being drawn, which `draw` ends."""

    def __init__(self, **settings: object) -> None:
        self.taken, self.quiet_s = 0, 0.0
        self.levels: tuple[LevelCard, ...] = ()
        self.wants_groups, self.is_paused = True, False
        self.waiting_with_signal = self.groups_in_scoring = self.trajectories_held = 0
        self.state = "running"
        self.drawing: list[asyncio.Future[DrawResult]] = []
        fields = {"update_frequency": WANTED, "rollout_group_size": SIZE, "draw_ahead_after_s": 0.05, **settings}
        config = SimpleNamespace(rl_training=changed(TRAINING, **fields), server=SimpleNamespace(max_batch_size=16))
        served = SimpleNamespace(engine=SimpleNamespace(stats=lambda: SimpleNamespace(paused=False)))
        self.server = ServerRollouts(config, served, SimpleNamespace(service=self), None)
        self.server._rollouts = self
        self.server.start()

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(state=self.state)

    async def draw(self, groups: int) -> DrawResult:
        self.taken += groups
        self.drawing.append(asyncio.get_running_loop().create_future())
        return await self.drawing[-1]

    async def close(self) -> None:
        pass

    def end(self, groups: int) -> None:
        """So many groups are drawn, and wait for their rewards."""
        self.groups_in_scoring += groups
        self.trajectories_held += groups * SIZE
        for drawn in self.drawing[:groups]:
            drawn.set_result(DrawResult(1, ()))
        del self.drawing[:groups]

    def reward(self, groups: int) -> None:
        self.groups_in_scoring -= groups
        self.waiting_with_signal += groups * SIZE
        self.wants_groups = self.waiting_with_signal < WANTED

    def update(self) -> None:
        """An update takes its groups, and is being made."""
        self.waiting_with_signal -= WANTED
        self.trajectories_held -= WANTED
        self.wants_groups, self.state = self.waiting_with_signal < WANTED, "updating"

    async def takes(self, tasks: int) -> None:
        """Exactly so many tasks are taken."""
        await until(lambda: self.taken >= tasks)
        await asyncio.sleep(0.4)
        assert self.taken == tasks


@pytest.fixture
async def world(request: pytest.FixtureRequest):
    one = World(**getattr(request, "param", {}))
    yield one
    await one.server.close()


async def until(true: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < 20
        await asyncio.sleep(0.01)


async def test_while_rewards_are_awaited_the_groups_of_one_more_update_are_drawn(world: World) -> None:
    await world.takes(2)
    world.end(2)
    world.quiet_s = 1.0
    await world.takes(4)
    world.end(2)
    await world.takes(4)  # never those of a third update
    world.reward(2)
    await world.takes(4)
    world.update()
    await world.takes(4)  # the two that wait would be two versions old after the update that they are for
    world.state = "running"
    await world.takes(6)


async def test_groups_that_wait_for_tools_count_like_those_that_wait_for_rewards(world: World) -> None:
    await world.takes(2)
    world.quiet_s = 1.0
    await world.takes(4)


async def test_nothing_is_drawn_ahead_while_the_model_draws_or_nothing_waits(world: World) -> None:
    await world.takes(2)
    world.end(2)
    world.reward(2)
    world.quiet_s = 1.0
    await world.takes(2)


@pytest.mark.parametrize(
    "world",
    [{"draw_ahead_after_s": None}, {"max_staleness": 0}, {"trajectory_buffer_size": 2 * WANTED - 1}],
    indirect=True,
)
async def test_some_settings_take_turns(world: World) -> None:
    await world.takes(2)
    world.end(2)
    world.quiet_s = 1.0
    await world.takes(2)
