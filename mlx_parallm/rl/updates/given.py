"""Trajectories that a client gives with an update: checked, joined into episodes, and grouped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mlx_parallm.config import LossKind, ResolvedLoss
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.objectives.batches import ScoredGroup
from mlx_parallm.rl.recording import check_given
from mlx_parallm.rl.trajectories import Episode

_ALL = "trajectories"
"""The field that an error about several trajectories names."""


def given_groups(
    trajectories: Iterable[GivenTrajectory], staleness: Callable[[AdapterRef], int] = lambda version: 0
) -> tuple[ScoredGroup, ...]:
    """Groups a client's trajectories by `group_id`, or by prompt if they have none; in order of appearance. Those of
    one group with the same `episode_id` are one episode.

    `staleness`: gives that of the version that drew a trajectory, and raises if the version cannot be trained on.

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
