"""The `TrainingClient` of a server that does not train."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NoReturn

from mlx_parallm.core import (
    AdapterRef,
    CheckpointCard,
    Collection,
    GivenTrajectory,
    TrainingClient,
    TrainingEvent,
    TrainingStatus,
    TrajectoryCard,
    UpdateReport,
)
from mlx_parallm.errors import TrainingDisabledError


class NoTraining(TrainingClient):
    """Says that training is off, and refuses the rest."""

    def status(self, adapter: str | None = None) -> TrainingStatus:
        return TrainingStatus(enabled=False)

    async def check(self, collection: Collection, adapter: AdapterRef) -> None:
        refuse_training("collect_trajectory")

    def feedback(self, trajectory_id: str, score: float) -> None:
        refuse_training()

    async def update(
        self,
        adapter: str | None = None,
        given: Sequence[GivenTrajectory] | None = None,
        publish: bool = True,
        checkpoint_name: str | None = None,
    ) -> UpdateReport:
        refuse_training()

    async def start(self, adapter: str | None = None) -> TrainingStatus:
        refuse_training()

    async def pause(self, adapter: str | None = None) -> TrainingStatus:
        refuse_training()

    async def resume(self, adapter: str | None = None) -> TrainingStatus:
        refuse_training()

    async def rollback(self, adapter: str | None = None, to: str | None = None) -> TrainingStatus:
        refuse_training()

    def trains(self, selector: str | None) -> bool:
        return False

    async def save(
        self, adapter: str | None, step: int | None, tags: Sequence[str], metrics: Mapping[str, float]
    ) -> CheckpointCard:
        refuse_training()

    def events(self) -> AsyncIterator[TrainingEvent]:
        refuse_training()

    def trajectories(self, limit: int) -> tuple[TrajectoryCard, ...]:
        refuse_training()


def refuse_training(param: str | None = None) -> NoReturn:
    """Raises TrainingDisabledError."""
    raise TrainingDisabledError("This server does not train; start it with --enable-rl-training.", param=param)
