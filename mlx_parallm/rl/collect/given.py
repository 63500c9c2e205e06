"""Groups that were drawn and rewarded elsewhere: checked, and made into trajectories that wait for an update."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from mlx_parallm.config import ResolvedLoss
from mlx_parallm.core import CollectionSpec, GivenGroup, GivenTrajectory, Trajectory
from mlx_parallm.errors import InvalidRequestError

PREFIX = "given-"
"""The ids of these groups begin with it, in the buffer and in the journal."""

_PARAM = "trajectories"


def rewards_of(group: GivenGroup, loss: ResolvedLoss) -> tuple[float, ...]:
    """The rewards of the group's trajectories, in order.

    Raises:
        InvalidRequestError: the group cannot be trained on with this loss.
    """
    if not group.trajectories:
        raise InvalidRequestError("a group needs at least one trajectory", _PARAM)
    if any(each.advantages for each in group.trajectories) and not loss.reads_advantages:
        raise InvalidRequestError(
            f"the loss {loss.algorithm.value} reads no advantages; leave them out, or train with another loss", _PARAM
        )
    return tuple(_reward(each, f"{_PARAM}[{number}]") for number, each in enumerate(group.trajectories))


def _reward(trajectory: GivenTrajectory, param: str) -> float:
    """Raises InvalidRequestError: the trajectory cannot be trained on."""
    check_given(trajectory, param)
    if trajectory.reward is None:
        raise InvalidRequestError(f"{param}: give a reward", param)
    return trajectory.reward


def check_given(trajectory: GivenTrajectory, param: str) -> None:
    """Checks a trajectory that was drawn elsewhere. `param`: the field that an error names.

    Raises:
        InvalidRequestError: it cannot be trained on.
    """
    if not trajectory.prompt_ids or not trajectory.completion_ids:
        raise InvalidRequestError(f"{param}: give at least one prompt token and one completion token", param)
    for name, values in (
        ("mask", trajectory.mask),
        ("sampling_logprobs", trajectory.sampling_logprobs),
        ("advantages", trajectory.advantages),
        ("reference_logprobs", trajectory.reference_logprobs),
    ):
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


def trajectories_of(group: GivenGroup) -> tuple[Trajectory, ...]:
    """The group's trajectories with ids of their own. Its source takes the place of a scorer."""
    group_id, now = PREFIX + group.group_id, time.time()
    texts: Sequence[str] = group.texts or ("",) * len(group.trajectories)
    return tuple(
        Trajectory(
            trajectory_id=f"{group_id}-{number}",
            group_id=group_id,
            group_size=len(group.trajectories),
            adapter=None,
            prompt_ids=each.prompt_ids,
            completion_ids=each.completion_ids,
            sampling_logprobs=each.sampling_logprobs,
            temperature=each.temperature,
            text=text,
            finish_reason=None,
            collection=CollectionSpec(group.source),
            created=now,
            mask=each.mask,
            advantages=each.advantages,
            reference_logprobs=each.reference_logprobs,
        )
        for number, (each, text) in enumerate(zip(group.trajectories, texts, strict=True))
    )
