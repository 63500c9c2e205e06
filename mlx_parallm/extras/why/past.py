"""The updates of the past as they were made: their samples, with rewards, advantages and shares.

changes of the journal ─▶ prepared again, in order, as after a crash ─▶ PastUpdate, PastUpdate, …
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from mlx_parallm.config import LossKind, ResolvedLoss
from mlx_parallm.core.readers import Reader
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.extras.why.influence import Term, alone
from mlx_parallm.rl.objectives import PreparedUpdate, ScoredGroup, episode_data
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import LearningSettings, PolicyChange, Rollback, Start, Update
from mlx_parallm.rl.runs.store import JournalFile
from mlx_parallm.rl.shares import shares_of
from mlx_parallm.rl.trajectories import DropReason, Turn, owner_of
from mlx_parallm.rl.updates.recovery import prepared_as_made, scored_group
from mlx_parallm.train.data import Datum, UpdateSettings
from mlx_parallm.train.losses import UpdateTotals
from mlx_parallm.train.packing import minibatches

REMOVED = "its trajectories were removed from the journal, as checkpointing.journal_updates says"
"""Why the samples of an old update are not known."""


@dataclass(frozen=True, slots=True)
class PastSample:
    """One answer of an update, or one episode.

    Attributes:
        turns: its answers; at least one.
        reward: None if it had none.
        advantage: the mean over its trained tokens; None: nothing was learnt from it.
        share: its part of the update, 0 to 1; see `rl.shares`.
        reason: why nothing was learnt from it; empty if something was.
        data: what was learnt from.
    """

    turns: Sequence[Turn]
    reward: float | None
    advantage: float | None
    share: float
    reason: str
    scorer: str
    data: Sequence[Datum]

    @property
    def owner(self) -> str | None:
        """The key that has sent it; see `owner_of`."""
        return owner_of(self.turns)

    def is_readable(self, reader: Reader) -> bool:
        return all(reader.may_read(turn.owner) for turn in self.turns)

    @property
    def trajectory_id(self) -> str | None:
        """That of its last turn. None: a client sent it with the update."""
        last = self.turns[-1]
        return last.trajectory_id if isinstance(last, Trajectory) else None


@dataclass(frozen=True, slots=True)
class PastUpdate:
    """An update that was made, as it was.

    Attributes:
        settings: those that it was made with; None: a version of this package made it that did not keep them.
        loss: what was applied to its samples.
        samples: all of its batch, in order; empty if they are not known.
        step_scale: of its batch; see `UpdateBatch`.
        problem: why they are not; empty if they are.
    """

    change: PolicyChange
    body: Update
    settings: LearningSettings | None
    loss: ResolvedLoss
    samples: Sequence[PastSample] = ()
    step_scale: float = 1.0
    problem: str = ""

    @property
    def learning_rate(self) -> float:
        """That of its step, times how far the step went."""
        return self.body.metrics.get("learning_rate", 0.0) * self.body.metrics.get("step_scale", 1.0)

    def terms(self, configured: UpdateSettings) -> Iterator[tuple[PastSample, float, Term]]:
        """What each sample added to its loss, with the sample and its share. A pair is one term: its sample is the
        chosen answer, and its share that of both. `configured`: settings, if its own are not known."""
        settings = configured if self.settings is None else self.settings.update
        data = [datum for sample in self.samples for datum in sample.data]
        totals = {
            id(datum): total
            for part in minibatches(data, settings.minibatches)
            for total in [UpdateTotals.of(part)]
            for datum in part
        }
        norm, most = self.body.metrics.get("grad_norm", 0.0), settings.optimizer.max_grad_norm
        step = self.learning_rate * (min(self.step_scale, most / norm) if norm else self.step_scale)
        for samples in self._units():
            of_unit = [datum for sample in samples for datum in sample.data]
            share = sum(sample.share for sample in samples)
            yield samples[0], share, Term(of_unit, alone(self.loss), totals[id(of_unit[0])], step)

    def _units(self) -> Iterable[Sequence[PastSample]]:
        learnt = [sample for sample in self.samples if sample.data]
        if self.loss.kind is not LossKind.PAIRWISE:
            return ([sample] for sample in learnt)
        pairs: dict[int, list[PastSample]] = {}
        for sample in sorted(learnt, key=lambda each: -(each.advantage or 0.0)):
            pairs.setdefault(sample.data[0].group, []).append(sample)
        return pairs.values()


async def past_updates(
    journal: Journal,
    changes: Sequence[PolicyChange],
    wanted: Collection[int],
    settings: Mapping[str, LearningSettings],
    configured: UpdateSettings,
) -> AsyncIterator[PastUpdate]:
    """The updates with the `wanted` numbers, in order. All up to the last of them are prepared again, because the
    baselines of rewards come from the earlier ones. The event loop goes on between two of them.

    Args:
        changes: all of an adapter that the journal has, in order.
        settings: of updates, by digest. `configured`: of those that name none.

    Raises:
        ConfigError: the journal is damaged.
    """
    history, last = RewardHistory(), max(wanted, default=0)
    for change in changes:
        body = change.body
        if change.number > last:
            return
        if isinstance(body, Start):
            history = RewardHistory()
        elif isinstance(body, Rollback):
            if body.baselines is not None:
                history.restore_baselines(body.baselines)
        else:
            made_with = settings.get(body.settings)
            loss = (configured if made_with is None else made_with.update).loss
            past = PastUpdate(change, body, made_with, loss, problem=REMOVED)
            if not body.reduced:
                known = await journal.read(partial(JournalFile.trajectories, ids=body.trajectory_ids)) or {}
                past = await asyncio.to_thread(_prepared, past, known, history)
            if change.number in wanted:
                yield past


def _prepared(past: PastUpdate, known: Mapping[str, Trajectory], history: RewardHistory) -> PastUpdate:
    """The update with its samples. `history`: of rewards before it; it gets those of the update."""
    body = past.body
    try:
        groups = [scored_group(group, known) for group in body.groups]
    except KeyError:  # the journal lacks one of its trajectories
        return past
    made = prepared_as_made(body, groups, past.loss, history, body.teacher_logprobs)
    history.accept(made.history)
    batch = made.batch
    loss = batch.loss or past.loss
    samples = tuple(_samples(made, groups, _learnt(made, groups, loss, batch.samples)))
    return PastUpdate(past.change, body, past.settings, loss, samples, batch.step_scale)


_Learnt = Mapping[tuple[int, int], Sequence[tuple[Datum, float]]]
"""The data of each episode that was learnt from, with their shares, by the number of the group and the place in it."""


def _learnt(
    made: PreparedUpdate, groups: Sequence[ScoredGroup], loss: ResolvedLoss, samples: Sequence[Datum]
) -> _Learnt:
    """`samples`: those of the update that a teacher could score, if it has one, in order."""
    places = [(group, place) for group, place, data in episode_data(groups, made.advantages, loss) for _ in data]
    if loss.reads_teacher and made.teacher_logprobs is not None:
        places = [where for where, scored in zip(places, made.teacher_logprobs, strict=True) if scored]
    found: dict[tuple[int, int], list[tuple[Datum, float]]] = {}
    for where, datum, share in zip(places, samples, shares_of(samples, loss), strict=True):
        found.setdefault(where, []).append((datum, share * datum.loss_scale))
    return found


def _samples(made: PreparedUpdate, groups: Sequence[ScoredGroup], learnt: _Learnt) -> Iterator[PastSample]:
    for number, (group, computed) in enumerate(zip(groups, made.advantages, strict=True)):
        reason = computed.value if isinstance(computed, DropReason) else ""
        for place, episode in enumerate(group.episodes):
            data = learnt.get((number, place), [])
            values = [datum.advantages[at] for datum, _ in data for at in datum.trained()]
            yield PastSample(
                episode.turns,
                group.rewards[place] if group.rewards else None,
                fmean(values) if values else None,
                sum(share for _, share in data),
                reason or ("" if data else DropReason.LOW_REWARD.value),
                group.scorer,
                [datum for datum, _ in data],
            )
