"""What an update may learn from, before it is known how good each sample was: collected groups, or a client's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_parallm.core import GivenTrajectory, Trajectory
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.groups import FEEDBACK, Group, Member
from mlx_parallm.rl.samples import Sample


@dataclass(frozen=True, slots=True)
class Candidate:
    """One group: samples without advantages, and their rewards in the same order.

    `rewards` empty: none were given. `scorer`: whose running mean a single sample is compared with. `lag`: versions
    published since it was drawn.
    """

    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    scorer: str
    lag: int = 0


def collected(group: Group, members: Sequence[Member], lag: int, on_policy: bool) -> Candidate:
    """These members of a group, which have rewards."""
    rewards = tuple(member.reward for member in members if member.reward is not None)
    samples = tuple(_drawn(member.trajectory, on_policy) for member in members)
    judged = all(member.judged for member in members)
    return Candidate(samples, rewards, FEEDBACK if judged else group.scorer or FEEDBACK, lag)


def given(trajectories: Iterable[GivenTrajectory]) -> tuple[Candidate, ...]:
    """Trajectories with one `group_id`, or with none and one prompt, make a group; in order of appearance.

    Raises:
        InvalidRequestError: one of them cannot be learnt from, or some have a reward and some have none.
    """
    trajectories = tuple(trajectories)
    groups: dict[object, list[GivenTrajectory]] = {}
    for number, trajectory in enumerate(trajectories):
        _check(trajectory, f"trajectories[{number}]")
        groups.setdefault(trajectory.group_id or trajectory.prompt_ids, []).append(trajectory)
    if len({trajectory.reward is None for trajectory in trajectories}) > 1:
        raise InvalidRequestError("trajectories: give a reward with each of them, or with none", "trajectories")
    return tuple(
        Candidate(tuple(map(_brought, group)), tuple(t.reward for t in group if t.reward is not None), "given")
        for group in groups.values()
    )


def _drawn(trajectory: Trajectory, on_policy: bool) -> Sample:
    return Sample(
        prompt_ids=trajectory.prompt_ids,
        completion_ids=trajectory.completion_ids,
        sampling_logprobs=trajectory.sampling_logprobs,
        temperature=trajectory.temperature,
        advantage=0.0,
        group=0,
        on_policy=on_policy,
    )


def _brought(trajectory: GivenTrajectory) -> Sample:
    """Nobody knows what drew it, so it counts as on-policy only where the trainer's own logprobs stand in."""
    return Sample(
        prompt_ids=trajectory.prompt_ids,
        completion_ids=trajectory.completion_ids,
        sampling_logprobs=trajectory.sampling_logprobs,
        temperature=trajectory.temperature,
        advantage=0.0,
        group=0,
        on_policy=not trajectory.sampling_logprobs,
    )


def _check(trajectory: GivenTrajectory, param: str) -> None:
    logprobs = trajectory.sampling_logprobs
    if not trajectory.prompt_ids or not trajectory.completion_ids:
        raise InvalidRequestError(f"{param}: give one prompt token and one completion token at least", param)
    if logprobs and len(logprobs) != len(trajectory.completion_ids):
        raise InvalidRequestError(
            f"{param}: {len(logprobs)} sampling_logprobs for {len(trajectory.completion_ids)} completion tokens; give "
            "one for each, or none",
            param,
        )
    if not _finite((trajectory.reward or 0.0, *logprobs)):
        raise InvalidRequestError(f"{param}: reward and sampling_logprobs must be finite numbers", param)
    if not (trajectory.temperature > 0 and math.isfinite(trajectory.temperature)):
        raise InvalidRequestError(f"{param}: temperature must be above 0", param)


def _finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))
