"""The updates of the past as they were made: their samples, with rewards, advantages and shares.

changes of the journal ─▶ prepared again, in order, as after a crash ─▶ PastUpdate, PastUpdate, …
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from mlx_parallm.config import Algorithm, LossKind, ResolvedLoss
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.objectives import PreparedUpdate, ScoredGroup, episode_data, prepare
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import LearningSettings, PolicyChange, Rollback, Start, Update
from mlx_parallm.rl.runs.store import JournalFile
from mlx_parallm.rl.trajectories import DropReason, Turn
from mlx_parallm.rl.updates.recovery import scored_group
from mlx_parallm.train.data import Datum, UpdateSettings

REMOVED = "its trajectories were removed from the journal, as checkpoint.journal_updates says"
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
        """The key that has sent it. None: not known, or several have."""
        owners = {turn.owner for turn in self.turns}
        return owners.pop() if len(owners) == 1 else None

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
        problem: why they are not; empty if they are.
    """

    change: PolicyChange
    body: Update
    settings: LearningSettings | None
    loss: ResolvedLoss
    samples: Sequence[PastSample] = ()
    problem: str = ""

    @property
    def learning_rate(self) -> float:
        """That of its step, times how far the step went."""
        return self.body.metrics.get("learning_rate", 0.0) * self.body.metrics.get("step_scale", 1.0)


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
    except KeyError:
        return past
    made = prepare(
        groups, past.loss, history.draft(), body.wanted, body.publish, body.explores, learning_rate=body.learning_rate
    )
    history.accept(made.history)
    loss = made.batch.loss or past.loss
    samples = tuple(_samples(made, groups, loss, body.teacher_logprobs))
    return PastUpdate(past.change, body, past.settings, loss, samples)


def _samples(
    made: PreparedUpdate,
    groups: Sequence[ScoredGroup],
    loss: ResolvedLoss,
    teacher: Sequence[Sequence[float]] | None,
) -> Iterator[PastSample]:
    """The samples of a prepared update. `teacher`: the logprobs of a teacher for each datum, if the loss reads any."""
    places = [(group, place) for group, place, data in episode_data(groups, made.advantages, loss) for _ in data]
    learnt: dict[tuple[int, int], list[tuple[Datum, float]]] = {}
    shares = shares_of(made.batch.samples, loss)
    for at, (where, datum, share) in enumerate(zip(places, made.batch.samples, shares, strict=True)):
        taught = datum.with_teacher(teacher[at]) if teacher and teacher[at] else datum
        learnt.setdefault(where, []).append((taught, share))
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


def shares_of(samples: Sequence[Datum], loss: ResolvedLoss) -> list[float]:
    """Each sample's share of an update of these samples: the sum of the absolute weights of its tokens in the loss,
    divided by that of all; all 0 if none has a weight."""
    weights = [_weight(sample, loss) for sample in samples]
    return [weight / (sum(weights) or 1.0) for weight in weights]


def _weight(sample: Datum, loss: ResolvedLoss) -> float:
    trained = sample.trained()
    credits = loss.kind is LossKind.POLICY_GRADIENT and not loss.reads_teacher
    weight = sum(sample.loss_weights[at] * (abs(sample.advantages[at]) if credits else 1.0) for at in trained)
    in_answers = loss.algorithm in (Algorithm.GRPO, Algorithm.GSPO, Algorithm.KTO)
    return weight * sample.share / sample.weight if in_answers else weight
