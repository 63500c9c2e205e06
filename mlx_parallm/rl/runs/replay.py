"""Which changes of a policy have to be made again after a crash. Pure: no file, no array.

    checkpoint ──▶ update 7 ──▶ update 8 ──▶ rollback 9 (to checkpoint-5) ──▶ update 10 ──▶ crash
    at change 6                              made again: the rollback, then update 10

A checkpoint says which change of its adapter's policy was the last one in it. An update is deterministic, so the policy
after the crash is the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from mlx_parallm.rl.runs.records import PolicyChange, Rollback, Start, Update


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where training starts after the process has.

    Attributes:
        live: the live version as text; empty if there is none.
        checkpoint: the checkpoint that the policy was loaded from; empty if there is none.
        number: the last change that is in that checkpoint; None if it does not say, or if there is none.
    """

    live: str = ""
    checkpoint: str = ""
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """What brings the policy from its start point to where it was.

    Attributes:
        roll_back_to: this checkpoint is restored first; empty: none is.
        updates: are then made again, in order.
        lost: updates that cannot be made again, because what they started from is gone.
        last: number of the adapter's last change.
        is_new: this start point is not in the journal yet.
        lineage: the versions that training had continued from before `updates`, as text, oldest first.
        recent: metrics of the updates before `updates`, since the last rollback, oldest first.
        baselines: of rewards, before `updates`; None: those of the start point.
    """

    last: int
    roll_back_to: str = ""
    updates: tuple[PolicyChange, ...] = ()
    lost: int = 0
    is_new: bool = False
    lineage: tuple[str, ...] = ()
    recent: tuple[Mapping[str, float], ...] = ()
    baselines: Mapping[str, float] | None = None


def plan(changes: Sequence[PolicyChange], start: StartPoint) -> Replay:
    """What has to be done after training was opened at `start`. `changes`: of the adapter, in order; all of them, or
    those that `JournalFile.changes_since` gives."""
    last = max(start.number or 0, changes[-1].number if changes else 0)
    done = [change for change in changes if change.number <= (start.number or 0)]
    later = changes[len(done) :]
    if not later:
        return Replay(last, is_new=start.number is None, lineage=_lineage(done), recent=_recent(done))
    at = max((place for place, change in enumerate(later) if not isinstance(change.body, Update)), default=None)
    origin = None if at is None else later[at].body
    updates = tuple(later if at is None else later[at + 1 :])
    from_start = origin is None and later[0].number == (start.number or 0) + 1  # otherwise some of them were removed
    is_whole = (from_start or origin is not None) and not any(_is_reduced(change) for change in updates)
    if not is_whole or not _can_begin(origin, start, changes):
        lost = sum(isinstance(change.body, Update) and change.body.changed_policy for change in later)
        return Replay(last, lost=lost, is_new=True)
    to = origin.checkpoint if isinstance(origin, Rollback) and origin.checkpoint != start.checkpoint else ""
    before = done if at is None else changes[: len(done) + at + 1]
    baselines = origin.baselines if isinstance(origin, Rollback) else None
    lineage, recent = _lineage(before), _recent(before)
    return Replay(last, to, updates, lineage=lineage, recent=recent, baselines=baselines)


def _can_begin(origin: Start | Rollback | Update | None, start: StartPoint, changes: Sequence[PolicyChange]) -> bool:
    """Whether what the updates started from is here. `origin` None: they continue from the checkpoint. A rollback is
    not made again if the live version was loaded since: nobody has asked to replace that one."""
    match origin:
        case Start(base):
            return base == start.live
        case Rollback(checkpoint):
            is_of_these = bool(start.checkpoint) or any(start.live in _versions(change) for change in changes)
            return bool(checkpoint) and is_of_these
        case _:
            return start.number is not None


def _is_reduced(change: PolicyChange) -> bool:
    return isinstance(change.body, Update) and change.body.reduced


def _lineage(changes: Sequence[PolicyChange]) -> tuple[str, ...]:
    """The versions that training has continued from after these changes."""
    versions: list[str] = []
    for change in changes:
        if not isinstance(change.body, Update):
            versions.clear()
        versions += _versions(change)
    return tuple(versions)


def _versions(change: PolicyChange) -> tuple[str, ...]:
    """The versions that a change names. An update adds them to those before it; any other change replaces those."""
    match change.body:
        case Start(base, made):
            return (base, made) if made else (base,)
        case Rollback(lineage=lineage):
            return lineage
        case Update(version=int(number)):
            return (f"{change.adapter}@{number}",)
        case _:
            return ()


def _recent(changes: Sequence[PolicyChange]) -> tuple[Mapping[str, float], ...]:
    """Metrics of the updates since the last rollback or start."""
    updates = takewhile(lambda body: isinstance(body, Update), (change.body for change in reversed(changes)))
    return tuple(body.metrics for body in updates if isinstance(body, Update) and body.changed_policy)[::-1]
