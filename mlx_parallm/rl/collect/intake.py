"""Turns events of requests into groups of trajectories, buffers these, and gets their rewards within time limits."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import cast

from mlx_parallm.config import RLTrainingConfig
from mlx_parallm.core import (
    Event,
    FinishReason,
    GenerationRequest,
    RequestFinished,
    SequenceOutput,
    Trajectory,
)
from mlx_parallm.errors import EngineError, InvalidRequestError
from mlx_parallm.rl.collect.buffer import TrajectoryBuffer
from mlx_parallm.rl.collect.groups import DropReason, TrajectoryGroup
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.scoring.pool import ScoringError
from mlx_parallm.rl.scoring.service import ScoringService

_log = logging.getLogger(__name__)


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
        assert request.collection is not None
        self._request, self._collection = request, request.collection
        self._records = [_SequenceRecord() for _ in range(request.sequences)]

    def add(self, output: SequenceOutput) -> None:
        record = self._records[output.index]
        record.token_ids += output.token_ids
        record.logprobs += output.sampling_logprobs
        record.texts.append(output.text)
        record.finish_reason = output.finish_reason or record.finish_reason

    def groups(self) -> list[list[Trajectory]]:
        """One group for each prompt, in order. Raises EngineError: the engine left out logprobs."""
        now, n = time.time(), self._request.n
        trajectories = [self._trajectory(index, now) for index in range(len(self._records))]
        return [trajectories[start : start + n] for start in range(0, len(trajectories), n)]

    def _trajectory(self, index: int, now: float) -> Trajectory:
        request, record = self._request, self._records[index]
        if len(record.logprobs) != len(record.token_ids):
            raise EngineError(
                f"{request.request_id}: {len(record.token_ids)} tokens came with {len(record.logprobs)} logprobs"
            )
        prompt = index // request.n
        return Trajectory(
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
            collection=self._collection,
            created=now,
        )


async def collect(
    request: GenerationRequest,
    events: AsyncIterator[Event],
    on_group: Callable[[Sequence[Trajectory]], str],
    on_abort: Callable[[], None],
) -> AsyncGenerator[Event, None]:
    """Yields the events of a request that is marked for collection, and makes one group of trajectories of each prompt.

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


# ---- groups to rewards ---------------------------------------------------------------------------


class Intake:
    """Adds groups to the buffer and gets their rewards, from scorers and feedback. Event loop's thread only.

    Args:
        on_ready: called with an adapter's name whenever one of its groups may have become complete.
    """

    def __init__(
        self,
        buffer: TrajectoryBuffer,
        scorers: ScoringService,
        config: RLTrainingConfig,
        on_ready: Callable[[str], None],
        emit: Emit,
    ) -> None:
        self._buffer = buffer
        self._scorers = scorers
        self._config = config
        self._on_ready = on_ready
        self._emit = emit
        self._scoring: set[asyncio.Task[None]] = set()

    def add(self, adapter: str, trajectories: Sequence[Trajectory], refused: DropReason | None) -> DropReason | None:
        """Adds the group of one prompt. `refused`: why it cannot be trained on; None if it can.

        Returns:
            Why the group was dropped at once; None if it was not.
        """
        group = TrajectoryGroup(adapter, trajectories)
        self._emit(
            "collected",
            adapter=adapter,
            group_id=group.group_id,
            version=str(group.version),
            trajectories=len(trajectories),
        )
        self._buffer.add(group)
        if self._buffer.holds(group) and refused is not None:
            self._buffer.drop(group, refused)
        if not self._buffer.holds(group):
            return group.members[0].reason
        timeout_s = self._config.feedback_timeout_s if group.scorer is None else self._config.group_timeout_s
        if timeout_s is not None:
            asyncio.get_running_loop().call_later(timeout_s, self._expire, adapter, group.group_id)
        if group.scorer is not None:
            task = asyncio.create_task(self._score(group, trajectories))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)
        return None

    def feedback(self, trajectory_id: str, score: float) -> None:
        """See `core.TrainingClient.feedback`. Raises InvalidRequestError: the score is not a finite number."""
        if not math.isfinite(score):
            raise InvalidRequestError("The score must be a finite number.", param="score")
        group = self._buffer.feedback(trajectory_id, score)
        self._scored(group, trajectory_id=trajectory_id, score=score)

    async def close(self) -> None:
        """Cancels all scoring."""
        for task in self._scoring:
            task.cancel()
        await asyncio.gather(*self._scoring, return_exceptions=True)

    async def _score(self, group: TrajectoryGroup, trajectories: Sequence[Trajectory]) -> None:
        try:
            rewards = await self._scorers.score(trajectories)
            if len(rewards) != len(trajectories) or not all(map(math.isfinite, rewards)):
                raise ScoringError(f"{len(trajectories)} trajectories got the rewards {rewards}")
        except Exception as error:  # noqa: BLE001 - a failing scorer must affect only its own group
            _log.warning("scoring by %s failed: %s", group.scorer, error, exc_info=not isinstance(error, ScoringError))
            self._buffer.fail(group)
            self._on_ready(group.adapter)
            return
        self._buffer.score(group, rewards)
        self._scored(group, rewards=list(rewards))

    def _scored(self, group: TrajectoryGroup, **data: object) -> None:
        self._emit("scored", adapter=group.adapter, group_id=group.group_id, complete=group.complete, **data)
        if group.complete:
            self._on_ready(group.adapter)

    def _expire(self, adapter: str, group_id: str) -> None:
        """The argument is an id and not a group, so that the timer does not keep an ended group in memory."""
        self._buffer.expire(group_id)
        self._on_ready(adapter)
