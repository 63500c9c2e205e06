"""One adapter's loop over stand-ins for what it asks of others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from configs import TRAINING, changed
from rl.fakes import FakeLearner, FakePublisher, FakeScorers, set_scores, trajectories

from mlx_parallm.config import CheckpointingConfig, ResolvedTraining, RewardScale
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.checkpoints import PolicyOf
from mlx_parallm.rl.evaluation import Evaluator
from mlx_parallm.rl.parts import TrainingParts
from mlx_parallm.rl.trajectories import TrajectoryGroup
from mlx_parallm.rl.updates.adapter_training import AdapterTraining
from mlx_parallm.rl.updates.run import AdapterRun

NAME = "math"
SETTINGS = changed(TRAINING, update_frequency=4, scale_rewards=RewardScale.NONE)
RARELY_SAVED = CheckpointingConfig(interval=1000)


def ref(version: int) -> AdapterRef:
    return AdapterRef(NAME, version)


@dataclass
class Rig:
    """A loop over fakes, and every event it emitted."""

    settings: ResolvedTraining = SETTINGS
    checkpointing: CheckpointingConfig = RARELY_SAVED
    evaluator: Evaluator | None = None
    serves_base: bool = True
    policy_of: PolicyOf | None = None
    reward_key: float = 0.0
    learner: FakeLearner = field(default_factory=FakeLearner)
    events: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    publisher: FakePublisher = field(init=False)
    groups: int = 0

    def __post_init__(self) -> None:
        self.publisher = FakePublisher()
        self.restart()

    def restart(self) -> None:
        """The process ends, whenever; what is on disk and live stays."""
        self.buffer = TrajectoryBuffer(self.settings.trajectory_buffer_size)
        parts = TrainingParts(
            self.learner,
            self.publisher,
            self.publisher,
            FakeScorers(lambda _: 0.0),
            self.settings,
            self.checkpointing,
            self.evaluator,
            self.policy_of,
            reward_key=self.reward_key,
        )
        self.training = AdapterTraining(NAME, parts, self.emit, self.serves_base)
        self.loop = AdapterRun(self.training, self.buffer, self.settings, self.emit)

    def emit(self, kind: str, **data: object) -> None:
        self.events.append((kind, data))

    @property
    def kinds(self) -> list[str]:
        """What happened, in order, apart from the beginnings of updates."""
        return [kind for kind, _ in self.events if kind != "updating"]

    @property
    def saves(self) -> list[tuple[str, AdapterRef, tuple[str, ...]]]:
        return [(card.name, card.adapter, card.tags) for card, _ in self.publisher.saved]

    def drawn(self, *rewards: float, by: AdapterRef | None = None, scorer: str | None = "exact") -> TrajectoryGroup:
        """A complete group, of the last version."""
        self.groups += 1
        drawn_by = by or self.training.versions.latest
        group = TrajectoryGroup(NAME, trajectories(f"g{self.groups}", drawn_by, len(rewards), scorer))
        self.buffer.add(group)
        set_scores(group, rewards)
        self.loop.wake()
        return group

    def check(self) -> None:
        """Nothing is taken, and learner, live version and books tell the same."""
        self.buffer.check_integrity()
        assert self.loop.status().state != "updating"
        if (live := self.publisher.live(NAME)) is not None and not self.training.unpublished:
            assert self.publisher.versions[live] == self.learner.policies[NAME][0]
        assert self.training.reports.step == self.learner.policies[NAME][1]

    async def updated(self, *rewards: float, **options: object):
        """One update of one group of these rewards."""
        self.drawn(*rewards)
        return await self.loop.update(None, **options)

    async def updated_at(self, mean: float, groups: int = 8):
        """One update of groups with a signal and this mean reward: enough of them to tell a fall from noise."""
        for _ in range(groups):
            self.drawn(mean + 0.1, mean - 0.1)
        return await self.loop.update(None)


async def opened(**fields: object) -> Rig:
    rig = Rig(**fields)
    await rig.loop.open()
    rig.events.clear()
    return rig


async def settle(turns: int = 60) -> None:
    """Lets every task run until it waits for something that will not come."""
    for _ in range(turns):
        await asyncio.sleep(0)


class running:  # noqa: N801 - reads as a statement
    """The loop runs by itself while the block does."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    async def __aenter__(self) -> None:
        self.task = asyncio.create_task(self.rig.loop.run())
        await settle()

    async def __aexit__(self, *_: object) -> None:
        await settle()
        assert not self.task.done()
        self.task.cancel()
