"""TrajectoryRecorder: makes trajectories of the events of a request that is marked for collection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field, replace
from typing import cast

from mlx_parallm.core import Event, FinishReason, GenerationRequest, RequestFinished, SequenceOutput, Trajectory
from mlx_parallm.errors import EngineError
from mlx_parallm.rl.collect.groups import group_name


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
        name = group_name(request.collection)
        groups: list[list[Trajectory]] = [[] for _ in request.prompts]
        for index, record in enumerate(self._records):
            if len(record.logprobs) != len(record.token_ids):
                raise EngineError(
                    f"{request.request_id}: {len(record.token_ids)} tokens came with {len(record.logprobs)} logprobs"
                )
            prompt = index // request.n
            trajectory = Trajectory(
                trajectory_id=f"traj-{request.request_id}-{index}",
                group_id=name or f"group-{request.request_id}-{prompt}",
                group_size=(request.collection.group_size or 0) if name else request.n,
                adapter=request.adapter,
                prompt_ids=request.prompts[prompt],
                completion_ids=tuple(record.token_ids),
                sampling_logprobs=tuple(record.logprobs),
                temperature=request.sampling.temperature,
                text="".join(record.texts),
                finish_reason=record.finish_reason,
                collection=request.collection,
                created=now,
                owner=request.key,
            )
            groups[prompt].append(trajectory)
        return groups


async def collect(
    request: GenerationRequest,
    events: AsyncIterator[Event],
    on_group: Callable[[Sequence[Trajectory]], Awaitable[str]],
    on_abort: Callable[[], None],
    sampling: AbstractContextManager[None],
) -> AsyncGenerator[Event, None]:
    """Yields the events of a request that is marked for collection, and makes a group of trajectories for each prompt.

    Args:
        on_group: called with each group when the request has finished, all at once. It returns when the group is in the
            journal: why it cannot be trained on, or "". It runs to its end even if this is closed meanwhile.
        on_abort: called instead if the request does not finish.
        sampling: the block in which the events come.

    Yields:
        The events. RequestFinished also gets the ids of the trajectories, and the first warning of `on_group`.
    """
    recorder, finished = TrajectoryRecorder(request), False
    try:
        with sampling:
            async with aclosing(cast(AsyncGenerator[Event, None], events)):  # `core` requires that they have aclose()
                async for event in events:
                    if isinstance(event, SequenceOutput):
                        recorder.add(event)
                    elif isinstance(event, RequestFinished):
                        groups = recorder.groups()
                        finished = True
                        warnings = await asyncio.gather(*map(on_group, groups))
                        ids = tuple(trajectory.trajectory_id for group in groups for trajectory in group)
                        warning = next(filter(None, warnings), "")
                        event = replace(event, trajectory_ids=ids, trajectory_warning=warning)
                    yield event
    finally:
        if not finished:
            on_abort()
