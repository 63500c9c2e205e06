"""CollectingEngine: an engine that turns requests marked for training into groups of trajectories."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from mlx_parallm.core import (
    AdapterRef,
    Collection,
    DeviceSchedule,
    EngineClient,
    EngineStats,
    Event,
    FinishReason,
    GenerationRequest,
    PauseMode,
    RequestFinished,
    SequenceOutput,
    Trajectory,
)
from mlx_parallm.errors import EngineError


class Sink(Protocol):
    """Who takes what is collected."""

    def collected(self, group: Sequence[Trajectory]) -> str:
        """All trajectories of one prompt, in order of choice; why they will not be trained on, or ""."""
        ...

    def lost(self, adapter: AdapterRef, trajectories: int) -> None:
        """A request that was to give so many was aborted, or failed."""
        ...


class CollectingEngine:
    """Implements `core.EngineClient` by another one; every event passes through.

    A request with `collection` leaves one group a prompt when it finishes, and nothing when it does not. One that
    draws no token (max_tokens 0) is not collected.
    """

    def __init__(self, engine: EngineClient, sink: Sink) -> None:
        self._engine = engine
        self._sink = sink

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def reschedule(self, schedule: DeviceSchedule) -> None:
        await self._engine.reschedule(schedule)

    async def pause(self, mode: PauseMode) -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def sleep(self, bank: bool = False) -> None:
        await self._engine.sleep(bank)

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """See `core.EngineClient.generate`."""
        if request.collection is None or request.stopping.max_tokens == 0:
            return self._engine.generate(request)
        return self._collect(request, request.collection)

    async def _collect(self, request: GenerationRequest, collection: Collection) -> AsyncGenerator[Event, None]:
        drafts = [_Draft() for _ in range(request.sequences)]
        handed_over = False
        # `core` promises aclose() on this iterator.
        events = cast(AsyncGenerator[Event, None], self._engine.generate(request))
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, SequenceOutput):
                        drafts[event.index].add(event)
                    elif isinstance(event, RequestFinished):
                        event = self._hand_over(request, collection, drafts, event)
                        handed_over = True
                    yield event
        finally:
            if not handed_over:
                self._sink.lost(request.adapter, request.sequences)

    def _hand_over(
        self, request: GenerationRequest, collection: Collection, drafts: Sequence[_Draft], finished: RequestFinished
    ) -> RequestFinished:
        """Gives each prompt's group to the sink; the event with the trajectories' ids and the first warning."""
        now = time.time()
        drawn = [draft.trajectory(request, collection, index, now) for index, draft in enumerate(drafts)]
        groups = [drawn[start : start + request.n] for start in range(0, len(drawn), request.n)]
        warnings = [self._sink.collected(group) for group in groups]
        ids = tuple(trajectory.trajectory_id for trajectory in drawn)
        return replace(finished, trajectory_ids=ids, trajectory_warning=next(filter(None, warnings), ""))


@dataclass(slots=True)
class _Draft:
    """One choice so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.LENGTH

    def add(self, output: SequenceOutput) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.sampling_logprobs
        self.texts.append(output.text)
        self.finish_reason = output.finish_reason or self.finish_reason

    def trajectory(self, request: GenerationRequest, collection: Collection, index: int, now: float) -> Trajectory:
        """Raises EngineError: the engine left out logprobs."""
        if len(self.logprobs) != len(self.token_ids):
            raise EngineError(
                f"{request.request_id}: {len(self.token_ids)} tokens came with {len(self.logprobs)} logprobs"
            )
        prompt = index // request.n
        return Trajectory(
            trajectory_id=f"traj-{request.request_id}-{index}",
            group_id=f"group-{request.request_id}-{prompt}",
            group_size=request.n,
            adapter=request.adapter,
            prompt_ids=request.prompts[prompt],
            completion_ids=tuple(self.token_ids),
            sampling_logprobs=tuple(self.logprobs),
            temperature=request.sampling.temperature,
            text="".join(self.texts),
            finish_reason=self.finish_reason,
            collection=collection,
            created=now,
        )
