"""Groups of trajectories for people to read: rows of a list, one group in full, and the protocol that gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.signals import Signal
from mlx_parallm.core.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Which groups are wanted. None lets all groups pass.

    Attributes:
        adapter: name of the adapter that they train.
        version: a version that drew some of their answers, such as `math@3`.
        fate: see `GroupRow`.
        least_reward, most_reward: bounds of the mean reward. A group without a reward is outside of any bounds.
    """

    adapter: str | None = None
    version: str | None = None
    fate: str | None = None
    least_reward: float | None = None
    most_reward: float | None = None


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group as a row of a list.

    Attributes:
        number: grows from one group to the next that arrives, in one process.
        adapter: name of the adapter that it trains.
        versions: those that drew its answers; none if they are unknown.
        samples: the number of its answers or episodes.
        reward: mean of those that have one; None: none has, or it is an edit.
        fate: scored, if an update can take it now; else the first one of training, waiting (for a reward), scored,
            trained and dropped that some of its samples have.
        reason: why it was dropped; empty if it was not. If its samples have several reasons, the most frequent one.
        first: its first trajectory.
    """

    number: int
    group_id: str
    adapter: str
    versions: Sequence[AdapterRef]
    samples: int
    reward: float | None
    fate: str
    reason: str
    signal: Signal
    first: Trajectory


@dataclass(frozen=True, slots=True)
class GroupPage:
    """A part of a list of groups, newest first. `more`: whether older ones follow that are wanted, too."""

    rows: Sequence[GroupRow]
    more: bool


class Thumbs(StrEnum):
    """What a thumb on a sample does now.

    COUNT: it is a reward. COUNT_LATE: the sample was dropped, and is learnt from as late feedback. NOTHING: it is
    refused, because the sample was trained on, its update was refused, or it is an edit.
    """

    COUNT = "count"
    COUNT_LATE = "count_late"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class EditedAnswer:
    """What a person wrote in place of an answer. `fate` and `reason` are as in `GroupRow`."""

    text: str
    signal: Signal
    fate: str
    reason: str


@dataclass(frozen=True, slots=True)
class CollectedTurn:
    """One answer, and what is known about it.

    Attributes:
        advantages: one for each token of its completion; empty: no update has computed them.
        up, down: the number of people whose last opinion is for it, and against it.
    """

    trajectory: Trajectory
    advantages: Sequence[float]
    up: int
    down: int
    edits: Sequence[EditedAnswer]


@dataclass(frozen=True, slots=True)
class CollectedSample:
    """One answer of a group, or one episode with its turns in order. `advantage`: of the sample as a whole; None: no
    update has computed it. `fate` and `reason` are as in `GroupRow`."""

    turns: Sequence[CollectedTurn]
    reward: float | None
    advantage: float | None
    fate: str
    reason: str
    thumbs: Thumbs


@dataclass(frozen=True, slots=True)
class CollectedGroup:
    """One group in full. `scorer`: the scoring function that its requests named; None: there is none."""

    row: GroupRow
    scorer: str | None
    samples: Sequence[CollectedSample]
