"""Of which updates a version consists, from the changes of its adapter's policy. Pure: no file, no array.

    start 1 ──▶ update 2 ──▶ update 3 ──▶ rollback 4 (to math@1) ──▶ update 5      math@3 consists of updates 2 and 5
               math@1       math@2                                  math@3

A policy that was rebuilt without forgotten data consists of the updates before it, from which these were removed. A
compaction removes the oldest changes, and what updates have learnt from. What is missing is named, and not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.rl.runs.records import PolicyChange, Rollback, Start, Update


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a policy consists of: its start, and the updates that were made from there.

    Attributes:
        start: empty: a new policy, which equals the base model. Otherwise a version that no update of the journal has
            made, such as one that was loaded from a file.
        updates: those that have changed the policy, in order, whether or not a version was published of them.
        missing: numbers of the first and the last change that the policy may depend on and that say nothing any more;
            `updates` are those after them, and `start` is not known. None: there are none.
    """

    start: str = ""
    updates: tuple[PolicyChange, ...] = ()
    missing: tuple[int, int] | None = None

    @property
    def reduced(self) -> tuple[PolicyChange, ...]:
        """The updates whose groups a compaction has removed: what they learnt from is not known any more."""
        return tuple(change for change in self.updates if isinstance(change.body, Update) and change.body.reduced)

    @property
    def is_whole(self) -> bool:
        """Whether all updates are known, with what they learnt from."""
        return self.missing is None and not self.reduced


def lineage(
    changes: Sequence[PolicyChange], version: str | None = None, saved: Mapping[str, int] = MappingProxyType({})
) -> Lineage | None:
    """What a version of an adapter consists of; None: the journal does not say how it was made.

    An optimizer's state is continued from version to version as far as checkpoints have kept it; see
    `AdapterTraining.open`.

    Args:
        changes: all of the adapter that the journal has, in order.
        version: as text, such as `math@3`; None: the policy after the last change.
        saved: the number of the last change in the checkpoint of a version, which names the versions that were made
            for a checkpoint alone.
    """
    made = _made(changes, saved)
    at = len(changes) - 1 if version is None else made.get(version)
    if at is None:
        return None
    updates: list[PolicyChange] = []
    while at >= 0:
        change = changes[at]
        if isinstance(change.body, Rollback) and change.body.rebuilt:
            at -= 1
            continue
        if isinstance(change.body, Update):
            if change.body.changed_policy:
                updates.append(change)
            before, last = changes[at - 1].number if at else 0, change.number - 1
            if before != last or not before:
                return Lineage("", tuple(reversed(updates)), (min(before + 1, last), last))
            at -= 1
            continue
        start = _origin(change.body)
        if start is None:
            return Lineage("", tuple(reversed(updates)), (change.number, change.number))
        made_at = made.get(start, len(changes))
        if made_at >= at:
            return Lineage("" if made_at == at else start, tuple(reversed(updates)))
        at = made_at
    return Lineage()


def is_replaced(changes: Sequence[PolicyChange], checkpoint: str, number: float) -> bool:
    """Whether the policy of a checkpoint has something that was forgotten since: a rebuild has made its updates again.

    Args:
        changes: at least all rollbacks of the adapter.
        number: of the last change in the checkpoint.
    """
    rebuilds = ((change.number, change.body) for change in changes if isinstance(change.body, Rollback))
    return any(body.rebuilt and body.rebuilt <= number < at and body.checkpoint != checkpoint for at, body in rebuilds)


def _made(changes: Sequence[PolicyChange], saved: Mapping[str, int]) -> dict[str, int]:
    """The place in `changes` of the last change of each version. A rollback to the base model makes a version of its
    own, which equals that."""
    places = {change.number: place for place, change in enumerate(changes)}
    published = {
        f"{change.adapter}@{change.body.version}": place
        for place, change in enumerate(changes)
        if isinstance(change.body, Update) and change.body.version is not None
    }
    made = {version: places[number] for version, number in saved.items() if number in places}
    for place, change in enumerate(changes):
        if isinstance(change.body, Rollback) and change.body.rebuilt:
            made[change.body.lineage[-1]] = place
        elif isinstance(change.body, Rollback) and change.body.lineage[-2:-1] == (str(BASE_ADAPTER),):
            version = change.body.lineage[-1]
            is_all_here = change.number == place + 1  # otherwise a removed update may have made it
            if is_all_here and saved.get(version, change.number - 1) == change.number - 1:  # saved by the rollback
                made[version] = place
    return made | published


def _origin(body: Start | Rollback) -> str | None:
    """The version that training continued from; empty: a new policy; None: it is not said."""
    if isinstance(body, Start):
        return body.base
    versions = [version for version in body.lineage if version != str(BASE_ADAPTER)]
    return versions[-1] if versions else "" if body.lineage else None
