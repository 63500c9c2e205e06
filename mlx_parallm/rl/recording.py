"""How trajectories are made: from the events of a request, of what clients give, and as copies for late feedback."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from itertools import chain
from typing import cast

from mlx_parallm.config import LossKind, ResolvedLoss
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import (
    CollectionSpec,
    Event,
    FinishReason,
    GenerationRequest,
    RequestFinished,
    SequenceOutput,
    Signal,
)
from mlx_parallm.core.trajectories import GivenTrajectory, Trajectory
from mlx_parallm.errors import EngineError, InvalidRequestError
from mlx_parallm.rl.objectives import ScoredGroup
from mlx_parallm.rl.runs.records import Feedback
from mlx_parallm.rl.trajectories import DropReason, Episode, TrajectoryGroup, group_name

LATE = "late-"
"""The ids of copies for late feedback begin with it."""

NOT_COUNTED = frozenset({DropReason.HELD, DropReason.SKIPPED, DropReason.REPLACED})
"""Reasons of drops after which no opinion counts: an update on the answer was refused, or the answer was sent again."""

_TOO_OLD = (DropReason.STALE, DropReason.UNKNOWN_VERSION)

# -- from the events of a request ----------------------------------------------------------------


class TrajectoryRecorder:
    """Collects the outputs of one request that is marked for collection, and makes trajectories of them."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        # Of each sequence: token ids, logprobs, text and finish reason. Outputs may have much more, which is not kept.
        self._outputs: list[list[tuple[Sequence[int], Sequence[float], str, FinishReason | None]]] = [
            [] for _ in range(request.sequences)
        ]

    def add(self, output: SequenceOutput) -> None:
        recorded = (output.token_ids, output.sampling_logprobs, output.text, output.finish_reason)
        self._outputs[output.index].append(recorded)

    def groups(self) -> list[list[Trajectory]]:
        """One group for each prompt, in order. Raises EngineError: the engine left out logprobs."""
        now, n = time.time(), self._request.n
        trajectories = [self._trajectory(index, now) for index in range(self._request.sequences)]
        return [trajectories[first : first + n] for first in range(0, len(trajectories), n)]

    def _trajectory(self, index: int, created: float) -> Trajectory:
        request, prompt = self._request, index // self._request.n
        assert request.collection is not None
        name = group_name(request.collection)
        ids, logprobs, texts, reasons = zip(*self._outputs[index], strict=True) if self._outputs[index] else ((),) * 4
        completion, sampling = tuple(chain.from_iterable(ids)), tuple(chain.from_iterable(logprobs))
        if len(sampling) != len(completion):
            raise EngineError(f"{request.request_id}: {len(completion)} tokens came with {len(sampling)} logprobs")
        return Trajectory(
            trajectory_id=f"traj-{request.request_id}-{index}",
            group_id=name or f"group-{request.request_id}-{prompt}",
            group_size=(request.collection.group_size or 0) if name else request.n,
            adapter=request.adapter,
            prompt_ids=request.prompts[prompt],
            completion_ids=completion,
            sampling_logprobs=sampling,
            temperature=request.sampling.temperature,
            text="".join(texts),
            finish_reason=next(filter(None, reversed(reasons)), FinishReason.LENGTH),
            collection=request.collection,
            created=created,
            owner=request.key,
        )


async def record(
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


# -- of what clients give ------------------------------------------------------------------------


def check_given(trajectory: GivenTrajectory, param: str) -> None:
    """Checks a trajectory that a client gives. `param`: the field that an error names.

    Raises:
        InvalidRequestError: it cannot be trained on.
    """
    if not trajectory.prompt_ids or not trajectory.completion_ids:
        raise InvalidRequestError(f"{param}: give at least one prompt token and one completion token", param)
    for name in ("mask", "sampling_logprobs", "advantages", "reference_logprobs"):
        values: Sequence[float] = getattr(trajectory, name)
        if values and len(values) != len(trajectory.completion_ids):
            raise InvalidRequestError(
                f"{param}: {len(values)} {name} for {len(trajectory.completion_ids)} completion tokens; give one for "
                "each, or none",
                param,
            )
        if not all(map(math.isfinite, values)):
            raise InvalidRequestError(f"{param}: {name} must be finite numbers", param)
    if not math.isfinite(trajectory.reward or 0.0):
        raise InvalidRequestError(f"{param}: reward must be a finite number", param)
    if not (trajectory.temperature > 0 and math.isfinite(trajectory.temperature)):
        raise InvalidRequestError(f"{param}: temperature must be above 0", param)


# -- for late feedback: opinions of an answer that no update with rewards will take --------------


def late_copy(trajectory: Trajectory) -> Trajectory:
    """The answer by itself, and of no version, since that does not matter to its loss."""
    copy_id = LATE + trajectory.trajectory_id
    return replace(
        trajectory,
        trajectory_id=copy_id,
        group_id=copy_id,
        group_size=1,
        adapter=None,
        sampling_logprobs=(),
        collection=CollectionSpec(metadata=trajectory.collection.metadata, signal=Signal.LATE_FEEDBACK),
    )


def late_opinion(copy: Trajectory, score: float, user: str) -> Feedback:
    """An opinion of a copy: 1 is for the answer, -1 against it."""
    return Feedback(copy.trajectory_id, 1.0 if score > 0 else -1.0, user)


def outlived(group: TrajectoryGroup) -> Iterator[tuple[Trajectory, list[Feedback]]]:
    """The opinions of people that were taken in time, of answers that became too old before an update took them, as
    late feedback: copies of the answers, each with its opinions."""
    for member in group.members if group.signal is Signal.REWARDS else ():
        for turn in member.turns if member.reason in _TOO_OLD else ():
            if opinions := member.opinions.get(turn.trajectory_id):
                copy = late_copy(turn)
                yield copy, [late_opinion(copy, score, user) for user, score in opinions.items()]


# ---- given ---------------------------------------------------------------------------------------

_ALL = "trajectories"
"""The field that an error about several trajectories names."""


def given_groups(
    trajectories: Iterable[GivenTrajectory], staleness: Callable[[AdapterRef], int] = lambda version: 0
) -> tuple[ScoredGroup, ...]:
    """Groups a client's trajectories by `group_id`, or by prompt if they have none; in order of appearance. Those of
    one group with the same `episode_id` are one episode.

    `staleness`: gives that of the version that sampled a trajectory, and raises if the version cannot be trained on.

    Raises:
        InvalidRequestError: a trajectory cannot be trained on, only some of them have a reward or advantages, or those
            of one episode have different rewards.
    """
    trajectories = tuple(trajectories)
    for number, trajectory in enumerate(trajectories):
        param = f"{_ALL}[{number}]"
        check_given(trajectory, param)
        if not trajectory.trained_tokens:
            raise InvalidRequestError(f"{param}: give at least one completion token to train, by its mask", param)
    if len({bool(trajectory.advantages) for trajectory in trajectories}) > 1:
        raise InvalidRequestError(f"{_ALL}: give advantages with each of them, or with none", _ALL)
    groups = [[*episodes.values()] for episodes in _grouped(trajectories)]
    rewards = [[_reward(episode) for episode in episodes] for episodes in groups]
    if len({reward is None for of_group in rewards for reward in of_group}) > 1:
        raise InvalidRequestError(f"{_ALL}: give a reward with each of them, or with none", _ALL)
    return tuple(
        ScoredGroup(
            tuple(Episode(tuple(episode)) for episode in episodes),
            tuple(reward for reward in of_group if reward is not None),
            "given",
            max(staleness(each.adapter) if each.adapter else 0 for episode in episodes for each in episode),
        )
        for episodes, of_group in zip(groups, rewards, strict=True)
    )


def check_loss(groups: Sequence[ScoredGroup], loss: ResolvedLoss) -> None:
    """Checks that the loss can learn from what a client gave.

    Raises:
        InvalidRequestError: it needs rewards, or reads no advantages.
    """
    has_advantages = any(group.has_advantages for group in groups)
    if has_advantages and not loss.reads_advantages:
        raise InvalidRequestError(
            f"{_ALL}: the loss {loss.algorithm.value} reads no advantages; give rewards, or train with another loss",
            _ALL,
        )
    learns_anyway = loss.kind is LossKind.SFT or loss.reads_teacher
    if not (learns_anyway or has_advantages or all(group.rewards for group in groups)):
        raise InvalidRequestError(
            f"{_ALL}: give each of them a reward or advantages; only cross_entropy and distillation need neither",
            _ALL,
        )


def _grouped(trajectories: Iterable[GivenTrajectory]) -> Iterable[dict[object, list[GivenTrajectory]]]:
    """The trajectories of each episode, by group; in order of appearance. The group of an episode without a `group_id`
    is that of the prompt of its first trajectory."""
    groups: dict[object, dict[object, list[GivenTrajectory]]] = {}
    group_of: dict[str, object] = {}  # of episodes without a group_id
    for number, each in enumerate(trajectories):
        key: object = each.group_id or each.prompt_ids
        if each.episode_id and not each.group_id:
            key = group_of.setdefault(each.episode_id, key)
        groups.setdefault(key, {}).setdefault(each.episode_id or number, []).append(each)
    return groups.values()


def _reward(episode: Sequence[GivenTrajectory]) -> float | None:
    """The reward of an episode: that of those of its trajectories that have one."""
    rewards = {each.reward for each in episode if each.reward is not None}
    if len(rewards) > 1:
        raise InvalidRequestError(
            f"{_ALL}: the episode {episode[0].episode_id!r} has the rewards {sorted(rewards)[:4]}; give its whole "
            "reward with one of its trajectories, or the same with each",
            _ALL,
        )
    return next(iter(rewards), None)
