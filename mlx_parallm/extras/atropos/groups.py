"""Groups that Atropos' environments have sampled and rewarded: they wait for an update of the default adapter."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_parallm.config import ResolvedLoss
from mlx_parallm.core.requests import CollectionSpec, Signal
from mlx_parallm.core.trajectories import GivenTrajectory, Trajectory
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.recording import check_given
from mlx_parallm.rl.runs.records import Score
from mlx_parallm.rl.service import TrainingService

GIVEN = "given-"
"""The ids of these groups begin with it, in the buffer and in the journal."""

_PARAM = "trajectories"


@dataclass(frozen=True, slots=True)
class GivenGroup:
    """A group that was sampled and rewarded elsewhere, and waits for an update.

    Attributes:
        group_id: of this group alone.
        source: who sampled it, in place of a scorer's name. Rewards of one source are compared with each other over
            time.
        trajectories: each has a reward.
        texts: of the completions, in the same order; empty if they are not known.
    """

    group_id: str
    source: str
    trajectories: tuple[GivenTrajectory, ...]
    texts: tuple[str, ...] = ()


class AtroposGroups:
    """Adds groups to those that wait for an update, and says which wait. Event loop's thread only."""

    def __init__(self, service: TrainingService) -> None:
        self._service = service

    async def give(self, group: GivenGroup) -> None:
        """Adds a group to those that wait, and returns when it is on the disk. It is trained on even if versions were
        published since then, because the version that sampled it is unknown.

        Raises:
            InvalidRequestError: it cannot be trained on.
            QueueFullError: too many trajectories wait, in all or of this source; it may be given again later.
            StorageError: it could not be written, and will not be trained on.
        """
        service = self._service
        rewards, trajectories = given_rewards(group, service.parts.config.loss), given_trajectories(group)
        scores = [Score(each.trajectory_id, reward) for each, reward in zip(trajectories, rewards, strict=True)]
        kept = service.trajectories.keep(service.default_adapter, group.source, trajectories, scores)
        await service.changes.finished(kept)

    def sizes(self) -> Mapping[str, Sequence[int]]:
        """The sizes of the groups that no update has taken yet, by source."""
        signals = frozenset(signal.value for signal in Signal)
        sizes = self._service.trajectories.buffer.given_sizes()
        return {source: of_source for source, of_source in sizes.items() if source not in signals}

    async def last(self, count: int) -> Sequence[str]:
        """The ids of the last groups, in earlier processes too; newest first."""
        found = await self._service.parts.journal.read(lambda file: file.newest_groups(GIVEN, count)) or ()
        return [group_id.removeprefix(GIVEN) for group_id in found]


def given_trajectories(group: GivenGroup) -> tuple[Trajectory, ...]:
    """The group's trajectories with ids of their own. Its source takes the place of a scorer."""
    group_id, now = GIVEN + group.group_id, time.time()
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


def given_rewards(group: GivenGroup, loss: ResolvedLoss) -> tuple[float, ...]:
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
    for number, each in enumerate(group.trajectories):
        check_given(each, f"{_PARAM}[{number}]")
        if each.reward is None:
            raise InvalidRequestError(f"{_PARAM}[{number}]: give a reward", f"{_PARAM}[{number}]")
    return tuple(each.reward or 0.0 for each in group.trajectories)
