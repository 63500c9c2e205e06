"""Updates makes the updates of one adapter: what they learn, what becomes of their trajectories, and what follows.
DivergenceResponse: pauses training, or rolls it back, when something has diverged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mlx_parallm.config import Action, ResolvedTraining
from mlx_parallm.core import Divergence, Signal, UpdateReport
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.divergence.pausing import Pausing
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.objectives.batches import Advantages, PreparedBatch, ScoredGroup
from mlx_parallm.rl.objectives.rewards import RewardHistory
from mlx_parallm.rl.objectives.signals import prepare_signal, signal_of
from mlx_parallm.rl.runs.records import CHANGED
from mlx_parallm.rl.sources import SourceLedger
from mlx_parallm.rl.teachers import logprobs_for, taught
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup, TrajectoryState
from mlx_parallm.rl.updates.adapter_training import AdapterTraining
from mlx_parallm.rl.updates.pace import OF_LESSONS
from mlx_parallm.rl.updates.recovery import PolicyJournal
from mlx_parallm.rl.updates.selection import GroupSelection
from mlx_parallm.rl.updates.turns import UpdateTurns, sources
from mlx_parallm.train.advantages import GroupAdvantages
from mlx_parallm.train.data import PLACEHOLDERS, Datum
from mlx_parallm.train.step import NO_GRADIENT


class DivergenceResponse:
    """Responds to the divergences of one adapter. The lock of `TrainingLoop` orders the calls."""

    def __init__(
        self, training: AdapterTraining, changes: PolicyJournal, selection: GroupSelection, pausing: Pausing
    ) -> None:
        self._training = training
        self._changes = changes
        self._selection = selection
        self._pausing = pausing

    async def to_rewards(self) -> UpdateReport | None:
        """Reports a collapse of the rewards, and responds to it.

        Returns:
            The report of the update that is not made because of it; None: the update is to be made.
        """
        training = self._training
        fall = training.watch.judge_rewards(training.rewards.trend)
        if fall is None:
            return None
        training.watch.tell([fall], training.rewards.trend, training.live, training.reports.step)
        if fall.action == Action.TELL:
            return None
        await self.to([fall])
        rolled_back = fall.action == Action.ROLL_BACK
        reason = f"{fall.reason}: {training.live} is live again" if rolled_back else fall.reason
        report = training.reports.skipped(training.live, "rolled_back" if rolled_back else "diverged", reason)
        return replace(report, divergences=(fall,))

    async def to(self, found: Sequence[Divergence]) -> None:
        """Pauses or rolls back for divergences that were reported and whose update was held."""
        reasons = {each.action: each.reason for each in found}
        if Action.ROLL_BACK in reasons:
            await self._training.roll_back(None)
            await self._pausing.recorded(self._changes.rolled_back())
            self._selection.restart()
        if Action.PAUSE in reasons:
            self._pausing.pause(reasons[Action.PAUSE])


_log = logging.getLogger(__name__)

_DROP_REASONS = {"published": None, "trained": None, "held": DropReason.HELD, "skipped": DropReason.SKIPPED}
"""Why the trajectories of an update are dropped, by the status of its report. None: they were trained on."""
_MAX_NAMED_GROUPS = 128
"""The most groups that the event of an update's beginning names."""


@dataclass(frozen=True, slots=True)
class UpdateParts:
    """What updates use of their `TrainingLoop`. `sweep`: drops what cannot be trained on any more."""

    buffer: TrajectoryBuffer
    config: ResolvedTraining
    ledger: SourceLedger
    turns: UpdateTurns
    changes: PolicyJournal
    pausing: Pausing
    response: DivergenceResponse
    sweep: Callable[[], None]
    emit: Emit


class Updates:
    """Makes one update at a time, under the lock of `TrainingLoop`.

    Every group that is taken from the buffer is ended, whatever becomes of its update. If an update was skipped, held
    or failed, its trajectories are dropped, since another attempt would end the same way. If it was cancelled, because
    the process ends, or if the teacher scored none of its samples, they wait again.

    Attributes:
        untaught: whether the last update was skipped because the teacher scored none of its samples.

    Args:
        own_progress: what updates note as their progress if they are given none.
    """

    def __init__(
        self, training: AdapterTraining, parts: UpdateParts, own_progress: Callable[[], Mapping[str, float] | None]
    ) -> None:
        self._training = training
        self._parts = parts
        self._own_progress = own_progress
        self.untaught = False
        self._warned = False

    async def on_groups(
        self, groups: Sequence[TrajectoryGroup], publish: bool = True, progress: Mapping[str, float] | None = None
    ) -> UpdateReport:
        """Trains on groups that were taken from the buffer, and ends each of them."""
        parts = self._parts
        self._emit_updating([group.group_id for group in groups], sum(group.trajectories for group in groups))
        reasons: Sequence[DropReason | None] = [DropReason.SKIPPED] * len(groups)
        try:
            learnt = sources(groups)
            without_signal, taken = parts.turns.scored(groups)
            scored = [*without_signal, *taken]
            explores = self._explores(scored)
            if explores:
                scored += self._training.plateau.better
            wanted = parts.turns.wanted(signal_of(scored))
            history = self._training.rewards.draft()
            prepared = prepare_signal(scored, parts.config.loss, history, wanted, explores)
            first = len(without_signal)
            _note_advantages(groups, prepared.advantages[first : first + len(groups)])
            report = await self._learn(scored, prepared, history, publish, progress, wanted, explores)
            if report.status in CHANGED:
                parts.ledger.updated(self._training.name, learnt, report.metrics)
            if self.untaught:
                self._give_back(groups)
            reasons = _reasons(prepared, report)[first : first + len(groups)]
            advice, given_back = self._training.plateau.advice, self.untaught
            return replace(report, signal=signal_of(scored), advice=advice, given_back=given_back)
        except asyncio.CancelledError:
            self._give_back(groups)
            raise
        finally:
            for group, reason in zip(groups, reasons, strict=True):
                parts.buffer.finish(group, reason)

    async def on_given(
        self, groups: Sequence[ScoredGroup], publish: bool, progress: Mapping[str, float] | None
    ) -> UpdateReport:
        """Trains on groups that a client gave."""
        self._emit_updating((), sum(len(episode.turns) for group in groups for episode in group.episodes))
        history = self._training.rewards.draft()
        prepared = prepare_signal(groups, self._parts.config.loss, history)
        return await self._learn(groups, prepared, history, publish, progress)

    def _give_back(self, groups: Sequence[TrajectoryGroup]) -> None:
        for group in groups:
            group.observed = True  # it counts once in the reward trend, however often an update takes it
            self._parts.buffer.give_back(group)

    def _explores(self, scored: Sequence[ScoredGroup]) -> bool:
        """Whether an update on these groups looks for a way out of a plateau."""
        of_rewards = bool(scored) and signal_of(scored) is Signal.REWARDS
        return of_rewards and self._parts.turns.explores and not any(group.has_advantages for group in scored)

    def _emit_updating(self, group_ids: Sequence[str], trajectories: int) -> None:
        """Emits that an update begins. `group_ids`: of collected groups; the first of them are named."""
        named = list(group_ids[:_MAX_NAMED_GROUPS])
        self._parts.emit("updating", adapter=self._training.name, groups=named, trajectories=trajectories)

    def _warn_of_placeholders(self, samples: Sequence[Datum]) -> None:
        """Warns of samples whose `sampling_logprobs` are placeholders, the first time that there are some."""
        count = sum(sample.has_placeholder_logprobs for sample in samples)
        if count and not self._warned:
            self._warned = True
            _log.warning(PLACEHOLDERS, count, self._training.name)
            self._parts.emit("placeholder_logprobs", adapter=self._training.name, samples=count)

    async def _learn(
        self,
        groups: Sequence[ScoredGroup],
        prepared: PreparedBatch,
        history: RewardHistory,
        publish: bool,
        progress: Mapping[str, float] | None,
        wanted: int | None = None,
        explores: bool = False,
    ) -> UpdateReport:
        """`history`: of rewards, with those of these groups; see `PolicyJournal.updated`. The change is journaled,
        also that of an update that was held, skipped or failed, since its rewards count in their trend. Not if the
        teacher scored nothing: then the groups wait, and count when an update takes them again."""
        training, parts = self._training, self._parts
        self.untaught = False
        progress = self._own_progress() if progress is None else progress
        rate, logprobs = None, None

        async def record(report: UpdateReport) -> None:
            reasons = _reasons(prepared, report)
            change = parts.changes.updated(groups, reasons, history, wanted, publish, report, rate, explores, logprobs)
            await parts.pausing.recorded(change)

        try:
            await training.mark_best()
            of_rewards = signal_of(groups) is Signal.REWARDS
            if of_rewards and (instead := await parts.response.to_rewards()) is not None:
                if all(each.action != Action.ROLL_BACK for each in instead.divergences):  # which starts a new trend
                    await record(instead)
                return instead
            if not groups:
                return training.reports.skipped(training.live, "no_trajectories")
            if not prepared.batch.teaches:
                report = training.reports.skipped(training.live, "no_signal", metrics=prepared.batch.metrics)
                await record(report)
                return report
            self._warn_of_placeholders(prepared.batch.samples)
            try:
                await training.evaluate_if_due()  # the version that training starts from
                rate = training.pace.learning_rate if signal_of(groups) in OF_LESSONS else None
                batch = replace(prepared.batch, learning_rate=rate)
                logprobs, problem = await logprobs_for(training.teacher, batch, parts.config.loss)
                batch = taught(batch, logprobs)
                self.untaught = not batch.samples
                if self.untaught:
                    report = training.reports.skipped(training.live, "no_teacher", problem, metrics=batch.metrics)
                else:
                    report = await training.learn(batch, publish, progress)
            except Exception:  # whatever it is, it is raised again
                await record(UpdateReport(training.live, training.reports.step, "skipped", "failed"))
                raise
            if not self.untaught:
                await record(report)
            if report.divergences:
                await parts.response.to(report.divergences)
                report = replace(report, adapter=training.live, step=training.reports.step)
        finally:
            parts.sweep()
        at_fault = report.status == "skipped" and report.reason != NO_GRADIENT
        if at_fault or (report.status == "held" and report.divergences):
            parts.pausing.failed(report.reason)
        else:
            parts.pausing.succeeded()
        return report

    def failed(self, error: Exception) -> None:
        """Reports and counts an update, or what belongs to it, that has raised an error."""
        training, reason = self._training, str(error) or type(error).__name__
        training.reports.skipped(training.live, "failed", reason)
        self._parts.pausing.failed(f"it failed: {reason}")

    async def conclude(self, report: UpdateReport) -> UpdateReport:
        """Evaluates the new version and saves a checkpoint, each if it is due. Adds them to the report."""
        if report.status == "published" and (result := await self._training.evaluate_if_due()):
            report = replace(report, metrics={**report.metrics, **result.metrics})
        name = await self._training.save_if_due()
        return report if name is None else replace(report, checkpoint=name)


def _reasons(prepared: PreparedBatch, report: UpdateReport) -> list[DropReason | None]:
    """For each group of an update, why it was not trained on; None: it was."""
    return [reason or _DROP_REASONS[report.status] for reason in prepared.drop_reasons]


def _note_advantages(groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages]) -> None:
    """Keeps the advantages of the members that an update has taken, for people to look at."""
    for group, computed in zip(groups, advantages, strict=True):
        members = group.in_state(TrajectoryState.TRAINING)
        if isinstance(computed, DropReason):
            computed = GroupAdvantages((0.0,) * len(members))
        group.divisor = computed.divisor
        for member, value in zip(members, computed.values, strict=True):
            member.advantage = value
