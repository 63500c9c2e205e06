"""Trajectories: makes groups of them from a request's events, and keeps their states and an adapter's past versions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import cast

from mlx_parallm.core import (
    AdapterRef,
    Event,
    FinishReason,
    GenerationRequest,
    RequestFinished,
    SequenceOutput,
    Trajectory,
    TrajectoryCard,
)
from mlx_parallm.errors import EngineError

# ---- events to trajectories ----------------------------------------------------------------------


@dataclass(slots=True)
class _SequenceRecord:
    """The outputs of one sequence so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.LENGTH


class TrajectoryRecorder:
    """Collects the outputs of one request that is marked for collection, and makes trajectories of them."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._records = [_SequenceRecord() for _ in range(request.sequences)]

    def add(self, output: SequenceOutput) -> None:
        record = self._records[output.index]
        record.token_ids += output.token_ids
        record.logprobs += output.sampling_logprobs
        record.texts.append(output.text)
        record.finish_reason = output.finish_reason or record.finish_reason

    def groups(self) -> list[list[Trajectory]]:
        """One group for each prompt, in order. Raises EngineError: the engine left out logprobs."""
        request, now = self._request, time.time()
        assert request.collection is not None
        groups: list[list[Trajectory]] = [[] for _ in request.prompts]
        for index, record in enumerate(self._records):
            if len(record.logprobs) != len(record.token_ids):
                raise EngineError(
                    f"{request.request_id}: {len(record.token_ids)} tokens came with {len(record.logprobs)} logprobs"
                )
            prompt = index // request.n
            trajectory = Trajectory(
                trajectory_id=f"traj-{request.request_id}-{index}",
                group_id=f"group-{request.request_id}-{prompt}",
                group_size=request.n,
                adapter=request.adapter,
                prompt_ids=request.prompts[prompt],
                completion_ids=tuple(record.token_ids),
                sampling_logprobs=tuple(record.logprobs),
                temperature=request.sampling.temperature,
                text="".join(record.texts),
                finish_reason=record.finish_reason,
                collection=request.collection,
                created=now,
            )
            groups[prompt].append(trajectory)
        return groups


async def collect(
    request: GenerationRequest,
    events: AsyncIterator[Event],
    on_group: Callable[[Sequence[Trajectory]], str],
    on_abort: Callable[[], None],
) -> AsyncGenerator[Event, None]:
    """Yields the events of a request that is marked for collection, and makes a group of trajectories for each prompt.

    Args:
        on_group: called with each group when the request has finished; returns why it cannot be trained on, or "".
        on_abort: called instead if the request does not finish.

    Yields:
        The events. RequestFinished also gets the ids of the trajectories, and the first warning of `on_group`.
    """
    recorder, finished = TrajectoryRecorder(request), False
    try:
        async with aclosing(cast(AsyncGenerator[Event, None], events)):  # `core` requires that events have aclose()
            async for event in events:
                if isinstance(event, SequenceOutput):
                    recorder.add(event)
                elif isinstance(event, RequestFinished):
                    groups = recorder.groups()
                    warnings = [on_group(group) for group in groups]
                    finished = True
                    ids = tuple(trajectory.trajectory_id for group in groups for trajectory in group)
                    warning = next(filter(None, warnings), "")
                    event = replace(event, trajectory_ids=ids, trajectory_warning=warning)
                yield event
    finally:
        if not finished:
            on_abort()


# ---- groups --------------------------------------------------------------------------------------

FEEDBACK = "feedback"
"""Used in place of a scorer's name for groups whose rewards came from people."""


class TrajectoryState(StrEnum):
    """State of one trajectory; the values are those of `core.TrajectoryCard.state`."""

    WAITING = "waiting"
    SCORED = "scored"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


class DropReason(StrEnum):
    """Why a trajectory was not trained on.

    STALE: its version is more than `max_staleness` versions old. ZERO_VARIANCE: all rewards of its group are equal.
    SINGLE: there is no other reward to compare its reward with. LOW_REWARD: the loss is cross_entropy, and the reward
    does not exceed the threshold. ABORTED: its request did not finish. UNKNOWN_VERSION: the version that drew it is not
    in the version history of its adapter. SKIPPED: its update was skipped. HELD: the gate refused its update.
    """

    BUFFER_FULL = "buffer_full"
    STALE = "stale"
    ZERO_VARIANCE = "zero_variance"
    SINGLE = "single"
    LOW_REWARD = "low_reward"
    SCORING_FAILED = "scoring_failed"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    UNKNOWN_VERSION = "unknown_version"
    SKIPPED = "skipped"
    HELD = "held"


@dataclass(eq=False, slots=True)
class GroupMember:
    """One trajectory of a group. `from_feedback`: its reward came from a person. `reason`: set when it is dropped."""

    trajectory: Trajectory
    reward: float | None = None
    state: TrajectoryState = TrajectoryState.WAITING
    reason: DropReason | None = None
    from_feedback: bool = False

    def card(self) -> TrajectoryCard:
        return TrajectoryCard(self.trajectory, self.reward, self.state.value, self.reason or "")


class TrajectoryGroup:
    """The trajectories of one prompt, all drawn by the same adapter version.

    Attributes:
        adapter: name of the adapter that the group trains.
        version: the adapter version that drew the trajectories.
        scorer: the scoring function that the request named; None: rewards come only from feedback.
        number: order of arrival, assigned by the buffer.
        observed: whether its rewards are in the adapter's reward trend already, before an update takes it.
    """

    def __init__(self, adapter: str, trajectories: Sequence[Trajectory]) -> None:
        first = trajectories[0]
        self.adapter, self.version = adapter, first.adapter
        self.group_id, self.scorer = first.group_id, first.collection.scorer
        self.members = tuple(map(GroupMember, trajectories))
        self.number = 0
        self.observed = False

    @property
    def complete(self) -> bool:
        """Whether an update can take the group. If it has a scorer, every member needs a reward; without a scorer,
        feedback on one member is enough."""
        states = {member.state for member in self.members}
        if TrajectoryState.SCORED not in states or TrajectoryState.TRAINING in states:
            return False
        return self.scorer is None or TrajectoryState.WAITING not in states

    @property
    def taken(self) -> bool:
        """Whether an update is using the group now."""
        return bool(self.in_state(TrajectoryState.TRAINING))

    @property
    def waiting(self) -> tuple[GroupMember, ...]:
        return self.in_state(TrajectoryState.WAITING)

    @property
    def scored(self) -> tuple[GroupMember, ...]:
        return self.in_state(TrajectoryState.SCORED)

    def in_state(self, state: TrajectoryState) -> tuple[GroupMember, ...]:
        return tuple(member for member in self.members if member.state is state)


# ---- versions ------------------------------------------------------------------------------------


class VersionHistory:
    """The published versions of one adapter, in order; training continues from the last one.

    `staleness`, `includes_ever` and `announce` may be called on any thread.
    """

    def __init__(self, start: AdapterRef) -> None:
        self._positions = {start: 0}  # replaced and never modified, so that any thread may read it
        self._ever = {start}
        self._announced: AdapterRef | None = None
        self._saved: AdapterRef | None = None

    @property
    def latest(self) -> AdapterRef:
        return next(reversed(self._positions))

    def staleness(self, ref: AdapterRef) -> int | None:
        """How many versions were published after `ref`; None: `ref` is not in the history."""
        if ref in (self._announced, self._saved):
            return 0
        positions = self._positions
        return len(positions) - 1 - positions[ref] if ref in positions else None

    def includes_ever(self, ref: AdapterRef) -> bool:
        """Whether `ref` was in the history at any time. A request may use a version that a rollback has removed."""
        return ref in self._ever

    def announce(self, ref: AdapterRef) -> None:
        """Call this before `ref` goes live: requests can draw from it before `append` is called."""
        self._ever.add(ref)
        self._announced = ref

    def retract(self) -> AdapterRef | None:
        """Forgets the announced version, if there is one that was not appended, and returns it."""
        ref, self._announced = self._announced, None
        return ref

    def add_saved(self, ref: AdapterRef) -> None:
        """Call this when a checkpoint has saved the current policy as a new version, which requests may name. That
        version is in the history until the next one is appended."""
        self._ever.add(ref)
        self._saved = ref

    def append(self, ref: AdapterRef) -> None:
        self._ever.add(ref)
        self._positions = {**self._positions, ref: len(self._positions)}
        self._announced = self._saved = None

    def rewind_to(self, ref: AdapterRef) -> None:
        """Removes the versions after `ref`. If `ref` is not in the history, a new history starts with it."""
        position = self._positions.get(ref, 0)
        older = {version: at for version, at in self._positions.items() if at < position}
        self._ever.add(ref)
        self._positions = {**older, ref: position}
        self._announced = self._saved = None

    def last(self, count: int) -> tuple[str, ...]:
        """The last `count` versions as text, oldest first."""
        return tuple(map(str, list(self._positions)[-count:]))
