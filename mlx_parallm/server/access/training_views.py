"""Training as a key sees it that is limited to some adapters; see `views`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from mlx_parallm.core import (
    EVERYTHING,
    AverageCard,
    AverageSpec,
    AveragingClient,
    CheckpointCard,
    CollectedClient,
    ComparisonCard,
    ComparisonSpec,
    CompetitionClient,
    Edit,
    EditCard,
    FeedbackCard,
    FoundTrajectory,
    GivenTrajectory,
    LessonCard,
    LessonClient,
    LessonSpec,
    PeopleClient,
    Reader,
    RewardModelCard,
    RewardModelClient,
    RewardModelSpec,
    Signal,
    SignalReport,
    TrainingClient,
    TrainingEvent,
    TrainingHistory,
    TrainingStatus,
    TrajectoryClient,
    UpdateReport,
)
from mlx_parallm.errors import ConflictError, InvalidRequestError, shown
from mlx_parallm.server.access.keys import NamedKey
from mlx_parallm.server.access.views import SeenAdapters, shared


class SeenTraining:
    """Implements `core.TrainingClient` for a key that is limited to some adapters."""

    def __init__(self, training: TrainingClient, adapters: SeenAdapters, key: NamedKey) -> None:
        self._training, self._adapters, self._key = training, adapters, key

    def name_of(self, adapter: str | None) -> str:
        """The name of an adapter; None: of the default one.

        Raises:
            UnknownModelError: the key does not see it.
        """
        name = self._training.default_adapter if adapter is None else adapter
        self._adapters.check_name(name)
        return name

    @property
    def default_adapter(self) -> str:
        """See `core.TrainingClient.default_adapter`."""
        return self._training.default_adapter

    def statuses(self) -> Sequence[TrainingStatus]:
        """See `core.TrainingClient.statuses`."""
        return [self._seen(status) for status in self._training.statuses() if self._key.sees(status.adapter)]

    @property
    def trajectories(self) -> TrajectoryClient:
        """Those of this key; its `Reader` says of which adapters."""
        return self._training.trajectories

    @property
    def collected_groups(self) -> CollectedClient:
        """Its `Reader` says of which adapters."""
        return self._training.collected_groups

    @property
    def people(self) -> PeopleClient:
        return SeenPeople(self._training.people, self)

    @property
    def competition(self) -> CompetitionClient:
        return SeenCompetition(self._training.competition, self, self._adapters, self._key)

    async def update(
        self,
        adapter: str | None = None,
        given: Sequence[GivenTrajectory] | None = None,
        publish: bool = True,
        checkpoint_name: str | None = None,
        signal: Signal | None = None,
    ) -> UpdateReport:
        """See `core.TrainingClient.update`."""
        return await self._training.update(self.name_of(adapter), given, publish, checkpoint_name, signal)

    def status(self, adapter: str | None = None) -> TrainingStatus:
        """See `core.TrainingClient.status`."""
        return self._seen(self._training.status(self.name_of(adapter)))

    def _seen(self, status: TrainingStatus) -> TrainingStatus:
        return replace(status, trained=tuple(filter(self._key.sees, status.trained)))

    async def start(self, adapter: str | None = None) -> TrainingStatus:
        """See `core.TrainingClient.start`."""
        return self._seen(await self._training.start(self.name_of(adapter)))

    async def pause(self, adapter: str | None = None) -> TrainingStatus:
        """See `core.TrainingClient.pause`."""
        return self._seen(await self._training.pause(self.name_of(adapter)))

    async def resume(self, adapter: str | None = None) -> TrainingStatus:
        """See `core.TrainingClient.resume`."""
        return self._seen(await self._training.resume(self.name_of(adapter)))

    async def rollback(self, adapter: str | None = None, to: str | None = None) -> TrainingStatus:
        """See `core.TrainingClient.rollback`."""
        return self._seen(await self._training.rollback(self.name_of(adapter), to))

    def trains(self, selector: str | None) -> bool:
        """See `core.TrainingClient.trains`."""
        return self._training.trains(self.name_of(selector) if selector is None else selector)

    async def save(
        self, adapter: str | None, step: int | None, tags: Sequence[str], metrics: Mapping[str, float]
    ) -> CheckpointCard:
        """See `core.TrainingClient.save`."""
        return await self._training.save(self.name_of(adapter), step, tags, metrics)

    async def events(self, after: str = "") -> AsyncGenerator[TrainingEvent, None]:
        """See `core.TrainingClient.events`."""
        events = cast(AsyncGenerator[TrainingEvent, None], self._training.events(after))  # `core` promises aclose()
        async with aclosing(events):
            async for event in events:
                if self._shows(event):
                    yield event

    def _shows(self, event: TrainingEvent) -> bool:
        """Whether the key sees all adapters that an event names. One that names none tells of none."""
        named = [*event.data.get("adapters", ()), *filter(None, [event.data.get("adapter")])]
        return all(self._key.sees(str(name).partition("@")[0]) for name in named)

    def history(self, adapter: str | None, limit: int) -> TrainingHistory:
        """See `core.TrainingClient.history`."""
        history = self._training.history(self.name_of(adapter), limit)
        return replace(history, events=tuple(filter(self._shows, history.events)))


class SeenPeople:
    """Implements `core.PeopleClient` for a key that is limited to some adapters."""

    def __init__(self, people: PeopleClient, training: SeenTraining) -> None:
        self._people, self._training = people, training

    async def feedback(
        self, trajectory_id: str, score: float, user: str = "", reader: Reader = EVERYTHING
    ) -> FeedbackCard:
        """See `core.OpinionClient.feedback`."""
        return await self._people.feedback(trajectory_id, score, user, reader)

    async def find(self, trajectory_id: str, reader: Reader = EVERYTHING) -> FoundTrajectory:
        """See `core.PeopleClient.find`."""
        return await self._people.find(trajectory_id, reader)

    async def edit(self, edit: Edit) -> EditCard:
        """See `core.PeopleClient.edit`."""
        self._training.name_of(edit.adapter)
        return await self._people.edit(edit)

    def signal_report(self, adapter: str | None = None) -> SignalReport:
        """See `core.PeopleClient.signal_report`."""
        return self._people.signal_report(self._training.name_of(adapter))


class SeenCompetition:
    """Implements `core.CompetitionClient` for a key that is limited to some adapters."""

    def __init__(
        self, competition: CompetitionClient, training: SeenTraining, adapters: SeenAdapters, key: NamedKey
    ) -> None:
        self._competition, self._training, self._adapters, self._key = competition, training, adapters, key

    async def start(self, adapter: str | None, spec: ComparisonSpec) -> ComparisonCard:
        """See `core.CompetitionClient.start`."""
        name = self._training.name_of(adapter)
        if "@" in spec.candidate:  # otherwise it is a checkpoint of the adapter
            self._adapters.check(spec.candidate)
        return await self._competition.start(name, spec)

    async def stop(self, adapter: str | None) -> ComparisonCard:
        """See `core.CompetitionClient.stop`."""
        return await self._competition.stop(self._training.name_of(adapter))

    def cards(self) -> Sequence[ComparisonCard]:
        """See `core.CompetitionClient.cards`."""
        return [card for card in self._competition.cards() if self._key.sees(card.adapter)]

    def ended(self, adapter: str) -> dict[str, int]:
        """See `core.CompetitionClient.ended`."""
        return self._competition.ended(self._training.name_of(adapter))


class SeenAverages:
    """Implements `core.AveragingClient` for a key that is limited to some adapters."""

    def __init__(self, averages: AveragingClient, adapters: SeenAdapters) -> None:
        self._averages, self._adapters = averages, adapters

    async def average(self, spec: AverageSpec) -> AverageCard:
        """See `core.AveragingClient.average`."""
        for selector in spec.adapters:
            self._adapters.check(selector)
        self._adapters.check_name(spec.name)
        return await self._averages.average(spec)


class SeenRewardModels:
    """Implements `core.RewardModelClient` for a key that is limited to some adapters."""

    def __init__(self, models: RewardModelClient, key: NamedKey) -> None:
        self._models, self._key = models, key

    async def train(self, spec: RewardModelSpec) -> RewardModelCard:
        """Raises RoleError: a reward model learns from the preferences of all keys."""
        raise shared("A reward model learns from all preferences: it")

    async def score(self, name: str, rows: Sequence[tuple[int, ...]]) -> Sequence[float]:
        """See `core.RewardModelClient.score`."""
        if not self._key.sees(name):
            raise InvalidRequestError(f"no reward model is called {shown(name)}")
        return await self._models.score(name, rows)


class SeenLessons:
    """Implements `core.LessonClient` for a key that is limited to some adapters."""

    def __init__(self, lessons: LessonClient, training: SeenTraining, key: NamedKey) -> None:
        self._lessons, self._training, self._key = lessons, training, key

    def obstacle(self) -> str:
        """See `core.LessonClient.obstacle`."""
        return self._lessons.obstacle()

    def card(self) -> LessonCard | None:
        """See `core.LessonClient.card`."""
        card = self._lessons.card()
        return card if card is not None and self._key.sees(card.adapter) else None

    async def start(self, spec: LessonSpec) -> LessonCard:
        """See `core.LessonClient.start`."""
        name = self._training.name_of(spec.adapter)
        running = self._lessons.card()
        if running is not None and running.is_running and not self._key.sees(running.adapter):
            raise ConflictError("A lesson for another key's adapter runs. Try again when it has ended.")
        return await self._lessons.start(replace(spec, adapter=name))

    async def stop(self) -> LessonCard:
        """See `core.LessonClient.stop`."""
        if self.card() is None:
            raise ConflictError("No lesson runs.")
        return await self._lessons.stop()
