"""TrainingHooks: where extras take part in training, without being known to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.runs.records import Feedback
from mlx_parallm.rl.trajectories import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class TrainingHooks:
    """Functions that extras have added. They are called on the event loop's thread, in the order in which they were
    added. `str` is the name of an adapter.

    Attributes:
        started: a server has begun to train.
        ending: training is about to end; what it needs still works.
        too_late: opinions that the last process acknowledged, of answers that waited and are too old by now.
        begun: the training of an adapter begins or goes on, from its live version.
        before_change: an adapter is about to be updated, rolled back or stopped. Raises ConflictError: it must not be.
        forgotten: what is known of an adapter is removed; it is not in training.
        closed: training ends.
        wants: whether the answers of a version are collected however old it is.
        sampled: the answers to one prompt have come.
        scored: a group has become complete.
        ended: all members of a group are trained or dropped.
        check_integrity: raises AssertionError.
    """

    started: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    ending: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    too_late: list[Callable[[Sequence[Feedback]], Awaitable[None]]] = field(default_factory=list)
    begun: list[Callable[[str], None]] = field(default_factory=list)
    before_change: list[Callable[[str], None]] = field(default_factory=list)
    forgotten: list[Callable[[str], None]] = field(default_factory=list)
    closed: list[Callable[[], None]] = field(default_factory=list)
    wants: list[Callable[[AdapterRef], bool]] = field(default_factory=list)
    sampled: list[Callable[[Sequence[Trajectory]], None]] = field(default_factory=list)
    scored: list[Callable[[TrajectoryGroup], None]] = field(default_factory=list)
    ended: list[Callable[[TrajectoryGroup], None]] = field(default_factory=list)
    check_integrity: list[Callable[[], None]] = field(default_factory=list)
