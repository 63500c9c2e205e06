"""How an adapter is built anew: from which policy, and with which updates. Pure: no file, no array.

start ──▶ update 1 ──▶ update 2 ──▶ update 3 ──▶ update 4         checkpoint-2 is the newest one without it:
          checkpoint-1  checkpoint-2   ✗ forgotten                updates 3 and 4 are made again from there
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import ConflictError
from mlx_parallm.extras.forgetting.forgotten import ForgetSpec, Forgotten, only
from mlx_parallm.rl.runs.lineage import Lineage, is_replaced, lineage
from mlx_parallm.rl.runs.records import PolicyChange, Rollback, Start, TrainedEpisode, TrainedGroup, Update
from mlx_parallm.rl.updates.adapter_training import CHANGE
from mlx_parallm.rl.updates.recovery import ref_of

_RETENTION = "--journal-updates says how many updates are kept whole"


@dataclass(frozen=True, slots=True)
class RebuildPlan:
    """How the policy of an adapter is made again.

    Attributes:
        origin: the checkpoint that it starts from; None: `base`.
        base: the version that training started from; empty: a new policy.
        changes: the updates after that, in order, and the starts of training from versions of elsewhere.
        learnt: the numbers of those that the policy consists of. From the others, which were rolled back, only the
            baselines of rewards are made again.
        affected: the numbers of the updates that have learnt from what is to be forgotten.
        tainted: the numbers of the versions that were made by the first of these, or later.
        continues: the last version before the first of these; None: its trajectories, and later ones, stay.
    """

    origin: CheckpointCard | None
    base: str
    changes: tuple[PolicyChange, ...]
    learnt: frozenset[int]
    affected: tuple[int, ...]
    tainted: frozenset[int] = frozenset()
    continues: AdapterRef | None = None


def plan(
    adapter: str,
    changes: Sequence[PolicyChange],
    cards: Sequence[CheckpointCard],
    forgotten: Forgotten,
) -> RebuildPlan | None:
    """How an adapter is built anew; None: no update has learnt from what is to be forgotten.

    Args:
        changes: all of the adapter that the journal has, in order.
        cards: its checkpoints.

    Raises:
        ConflictError: it cannot be. The message says what is gone.
    """
    affected = [change.number for change in changes if forgotten.has(change)]
    if not affected:
        return None
    whole = lineage(changes)
    if whole is None:
        raise ConflictError(f"The journal does not say how {adapter} was made, so it cannot be built anew.")
    learnt = [change.number for change in whole.updates]
    origin = _origin(changes, cards, learnt, affected[0])
    number = 0 if origin is None else int(origin.metrics[CHANGE])
    if origin is None and whole.missing is not None:
        first, last = whole.missing
        raise ConflictError(
            f"{adapter} cannot be built anew: changes {first} to {last} of it are gone from the journal "
            f"({_RETENTION}), and no checkpoint before update {affected[0]} is left."
        )
    known = {f"{adapter}@{change.body.version}" for change in changes if isinstance(change.body, Update)}
    known |= {str(card.adapter) for card in cards}
    after = tuple(
        change
        for change in changes
        if change.number > number
        and (isinstance(change.body, Update) or (isinstance(change.body, Start) and change.body.base not in known))
    )
    if reduced := [change.number for change in after if isinstance(change.body, Update) and change.body.reduced]:
        raise ConflictError(
            f"{adapter} cannot be built anew: what updates {reduced[0]} to {reduced[-1]} have learnt from is gone from "
            f"the journal ({_RETENTION})."
        )
    continues = _last_before(changes, whole, affected[0]) if forgotten.spec.from_scratch else None
    later = (change.body for change in changes if change.number >= affected[0])
    made = [body.version for body in later if isinstance(body, Update) and body.version is not None]
    saved = [card.adapter.version for card in tainted(cards, affected[0])]
    versions = frozenset([*made, *saved])
    return RebuildPlan(origin, whole.start, after, frozenset(learnt), tuple(affected), versions, continues)


def unknown(changes: Sequence[PolicyChange], spec: ForgetSpec) -> int:
    """How many changes the policy may depend on that do not say any more whether they have learnt from it: they were
    removed, or a version reduced them that did not write their owners. The trajectories of these are gone, too."""
    if spec.trajectory_ids or not changes:
        return 0
    whole = lineage(changes)
    missing = whole.missing[1] if whole is not None and whole.missing is not None else 0
    if spec.key is None:
        return missing if spec.span[0] < changes[0].at else 0
    bodies = [change.body for change in changes if isinstance(change.body, Update)]
    return missing + sum(body.reduced and body.owners is None for body in bodies)


def _origin(
    changes: Sequence[PolicyChange], cards: Iterable[CheckpointCard], learnt: Sequence[int], first: int
) -> CheckpointCard | None:
    """The newest checkpoint of a policy from which training has continued up to now, and that has nothing of the
    update `first`."""
    clean = [card for card in cards if card.metrics.get(CHANGE, first) < first]
    clean = [card for card in clean if not is_replaced(changes, card.name, card.metrics[CHANGE])]
    for card in sorted(clean, key=lambda card: card.metrics[CHANGE], reverse=True):
        made = lineage([change for change in changes if change.number <= card.metrics[CHANGE]])
        numbers = None if made is None else [change.number for change in made.updates]
        if numbers is not None and numbers == [*learnt[: len(numbers)]]:
            return card
    return None


def _last_before(changes: Sequence[PolicyChange], whole: Lineage, first: int) -> AdapterRef:
    """The last version that has nothing of the update `first`."""
    learnt = {change.number for change in whole.updates}
    for change in reversed(changes[: [each.number for each in changes].index(first)]):
        match change.body:
            case Update(version=int(number)) if change.number in learnt:
                return AdapterRef(change.adapter, number)
            case Rollback(lineage=versions, rebuilt=rebuilt) if rebuilt:
                return ref_of(versions[-1])
    return ref_of(whole.start)


def tainted(cards: Iterable[CheckpointCard], first: int, before: float = math.inf) -> tuple[CheckpointCard, ...]:
    """The checkpoints that have the change `first`, or may have, and not the change `before`."""
    return tuple(card for card in cards if first <= card.metrics.get(CHANGE, first) < before)


@dataclass(frozen=True, slots=True)
class Outdated:
    """What was made from something that is forgotten, before the last rebuild. `versions`: their numbers."""

    cards: tuple[CheckpointCard, ...] = ()
    versions: frozenset[int] = frozenset()


def outdated(changes: Sequence[PolicyChange], cards: Iterable[CheckpointCard]) -> Outdated:
    """What the last rebuild of an adapter has replaced."""
    rebuilds = [change for change in changes if isinstance(change.body, Rollback) and change.body.rebuilt]
    if not rebuilds or not isinstance(last := rebuilds[-1].body, Rollback):
        return Outdated()
    found = tainted((card for card in cards if card.name != last.checkpoint), last.rebuilt, rebuilds[-1].number)
    replaced = (change.body for change in changes if last.rebuilt <= change.number < rebuilds[-1].number)
    made = [body.version for body in replaced if isinstance(body, Update) and body.version is not None]
    return Outdated(found, frozenset([*made, *(card.adapter.version for card in found)]))


def without(
    change: PolicyChange, forgotten: Forgotten, is_later: Callable[[TrainedEpisode], bool]
) -> tuple[list[TrainedGroup], int]:
    """The groups of an update without what is forgotten, and how many episodes are gone. `is_later`: whether a version
    that had learnt from it has sampled an episode, which is then left out too."""
    assert isinstance(change.body, Update)
    groups = change.body.groups
    kept = [only(group, [not is_later(each) for each in group.episodes]) for group in forgotten.rest(change, groups)]
    kept = [group for group in kept if group.episodes]
    gone = sum(len(group.episodes) for group in groups) - sum(len(group.episodes) for group in kept)
    return kept, gone
