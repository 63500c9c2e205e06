"""A training service over stand-ins for learner, publisher and scorers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from configs import TRAINING, changed
from rl.fakes import FakeEngine, FakeLearner, FakePublisher, FakeScorers
from rl.rig import settle as settle

from mlx_parallm.config import CheckpointingConfig, ResolvedTraining, RewardScale
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import (
    CollectionSpec,
    Event,
    FinishReason,
    GenerationRequest,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.core.trajectories import GivenTrajectory, Trajectory
from mlx_parallm.extras.competition import service as competition
from mlx_parallm.extras.lessons import record
from mlx_parallm.extras.people import service as people
from mlx_parallm.rl.evaluation import Evaluator
from mlx_parallm.rl.parts import TrainingParts
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.teachers import Teacher
from mlx_parallm.rl.trajectory_log import TrajectoryLog

SETTINGS = changed(TRAINING, update_frequency=4, scale_rewards=RewardScale.NONE, max_staleness=9)
CHECKPOINTING = CheckpointingConfig()
GIVEN = (GivenTrajectory((1,), (2,), 1.0), GivenTrajectory((1,), (3,), 0.0))


def first_is_best(trajectory: Trajectory) -> float:
    return float(trajectory.trajectory_id.endswith("-0"))


class World:
    """A service over fakes; `engine` answers every request with two choices, and is collected from."""

    def __init__(
        self,
        settings: ResolvedTraining,
        log: TrajectoryLog | None,
        checkpointing: CheckpointingConfig,
        journal: Journal | None = None,
        learner: FakeLearner | None = None,
        evaluator: Evaluator | None = None,
        teacher: Teacher | None = None,
        reward_key: float = 0.0,
    ) -> None:
        self.learner = learner or FakeLearner()
        self.publisher = FakePublisher()
        self.scorers = FakeScorers(first_is_best)
        parts = TrainingParts(
            self.learner,
            self.publisher,
            self.publisher,
            self.scorers,
            settings,
            checkpointing,
            evaluator,
            log=log,
            journal=journal or Journal(),
            teacher=teacher,
            reward_key=reward_key,
        )
        self.service = TrainingService(parts, "main")
        self.competition, self.people = competition.install(self.service), people.install(self.service)
        record.install(self.service)
        choices = [
            SequenceOutput(index, (5, 2), "a", finish_reason=FinishReason.STOP, sampling_logprobs=(-0.5, -0.1))
            for index in range(2)
        ]
        self.engine = FakeEngine([*choices, RequestFinished(1, 4, 0, 0, 0, 1)])
        self.requests = 0

    async def request(self, adapter: AdapterRef = BASE_ADAPTER, scorer: str | None = "exact") -> tuple[str, ...]:
        return (await self.finished(adapter, scorer)).trajectory_ids

    async def finished(self, adapter: AdapterRef, scorer: str | None = "exact") -> RequestFinished:
        self.requests += 1
        asked = GenerationRequest(
            f"r{self.requests}",
            ((1,),),
            SamplingParams(),
            StopParams(4),
            n=2,
            adapter=adapter,
            collection=CollectionSpec(scorer),
        )
        return [event async for event in self.generate(asked)][-1]

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        return self.service.trajectories.collect(request, self.engine.generate(request))

    def states(self) -> dict[str, str]:
        newest = self.service.trajectories.buffer.newest(1000)
        return {one.trajectory_id: member.reason or member.state for one, member in newest}


@asynccontextmanager
async def world(
    settings: ResolvedTraining = SETTINGS,
    log: TrajectoryLog | None = None,
    checkpointing: CheckpointingConfig = CHECKPOINTING,
) -> AsyncIterator[World]:
    one = World(settings, log, checkpointing)
    await one.service.start_adapter("main")
    try:
        yield one
        one.service.check_integrity()
    finally:
        await one.service.close()


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.001)
