"""AdapterTraining: updates the policy of one adapter, publishes it as a live version, and rolls it back.

    batch ─▶ learn ─▶ gate ─▶ stage ─▶ evaluate ─▶ flip ─▶ checkpoint
               │        │       │         │         │
               └────────┴───────┴─────────┴─────────┴──▶ undo: the policy is restored, the version discarded

Staging adds a version that no request gets yet; the flip makes it live. If the gate does not read the evaluation, all
from learn to flip happens on the device thread, without a trip to the event loop, and the live version is evaluated.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.adapters.weights import AdapterWeights, VersionInfo
from mlx_parallm.config import LossKind
from mlx_parallm.core.adapters import BASE_ADAPTER, BEST, AdapterRef
from mlx_parallm.core.requests import Signal
from mlx_parallm.rl.checkpoints import AdapterCheckpoints, TrainedVersion, VersionHistory
from mlx_parallm.rl.divergence import DivergenceWatch
from mlx_parallm.rl.evaluation import EvaluationHistory
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.objectives import PreparedUpdate, ScoredGroup, prepare, signal_of
from mlx_parallm.rl.parts import TrainingParts
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.runs.replay import StartPoint
from mlx_parallm.rl.shares import limited
from mlx_parallm.rl.status import Divergence, EvaluationResult, UpdateReport
from mlx_parallm.rl.teachers import logprobs_for, taught
from mlx_parallm.rl.updates.plateau import Plateau
from mlx_parallm.rl.updates.reports import Refusal, UpdateReporter, refusal_of, refusal_of_evaluation
from mlx_parallm.train.data import UpdateBatch, UpdateOutcome
from mlx_parallm.train.policy import PolicySnapshot, PolicyState

CHANGE = "journal_change"
"""Key of a checkpoint's metrics: the number of the last change of the policy that is in it."""

REWARD_KEY = "reward_key"
"""Key of a checkpoint's metrics, and of the trend of rewards in the journal: `TrainingParts.reward_key`."""

OF_LESSONS = (Signal.REWARDS, Signal.CORRECTIONS)
"""What the updates of a lesson learn from: rewards, and examples that are imitated."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """How much an update of one adapter takes, and how far it steps. A lesson changes it as long as it lasts.

    Attributes:
        trajectories: those with a signal that make an update of rewards.
        learning_rate: of updates of OF_LESSONS, without a schedule; None: as configured.
    """

    trajectories: int
    learning_rate: float | None = None


class AdapterTraining:
    """Trains one adapter. The lock of `AdapterRun` ensures that one coroutine uses it at a time.

    Invariant: while the learner's policy may differ from the one that versions and reports describe, `_undo` is the
    policy that they describe. It is restored before the learner's policy is used for anything else.

    Attributes:
        unpublished: whether the policy has updates that are in no published version.
        progress: where a run on an environment was at the last update, so that it can resume there. Each update
            replaces the values that it names.
        change: number of the last change of the policy. `PolicyJournal` counts them.
        start: where training started; set by `open`.
        pace: of its updates of rewards.
        plateau: whether nearly all answers earn the same part of the reward.
        checkpoints: those of the adapter, and its best version: the one with the best evaluation or, without
            evaluations, the one that was the latest when the running mean reward was highest.

    Args:
        serves_base: whether requests for this adapter get the base model until it has a version. If not, it gets a
            first version at once, equal to the base model.
    """

    def __init__(self, name: str, parts: TrainingParts, emit: Emit, serves_base: bool) -> None:
        self.name = name
        self.versions = VersionHistory(BASE_ADAPTER)
        self.rewards = RewardHistory()
        self.unpublished = False
        self.evaluations = EvaluationHistory()
        self.progress: Mapping[str, float] = {}
        self.change = 0
        self.start = StartPoint()
        self.pace = Pace(parts.config.update_frequency)
        self.plateau = Plateau(name, parts.config.plateau, emit, lambda: self.pace.trajectories)
        self.checkpoints = AdapterCheckpoints(
            name, parts.learner, parts.adapters, parts.checkpoints, parts.checkpointing, emit, parts.policy_of
        )
        self.reports = UpdateReporter(name, emit)
        self.watch = DivergenceWatch(name, parts.config.divergence, emit, self._can_roll_back)
        self._parts = parts
        self._emit = emit
        self.config = parts.config
        self.journal = parts.journal
        self._learner = parts.learner
        self._adapters = parts.adapters
        self._serves_base = serves_base
        self._undo: PolicyState | PolicySnapshot | None = None
        self._evaluated: EvaluationResult | None = None  # of the last update; `evaluate_if_due` adds it
        self._info: VersionInfo  # of every version that training makes; set by `open`

    @property
    def live(self) -> AdapterRef | None:
        """The adapter's live version, whether or not it was trained here."""
        return self._adapters.live(self.name)

    # -- start -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Starts training from the newest checkpoint of the live version. If that version has no checkpoint, training
        starts from its weights. If no version is live, it starts from a new policy that equals the base model.

        Raises:
            InvalidRequestError: the live version has another rank, alpha or targets than those configured.
            ConflictError: the live version was not trained here, and there is no `policy_of` to make a policy from it.
        """
        live = self.live
        card = self.checkpoints.newest_of(live)
        start = None if live is None else await self.checkpoints.policy_of(live, card)
        if live is not None and card is None:
            await self._adapters.keep_live(self.name)  # so that the next process can continue from it
        await self._learner.open(self.name, start)
        self._info = VersionInfo.of(self._learner.weights(self.name))
        self._undo = None
        self.unpublished, self.rewards = False, RewardHistory()
        self.watch.restart()
        self.plateau.restart()
        emit, every = partial(self._emit, adapter=self.name), self.config.evaluation.every or 1
        self.evaluations = EvaluationHistory(self._parts.evaluator, every, emit)
        self.checkpoints.unsaved.clear()
        self.checkpoints.set_best(None)
        self.versions = VersionHistory(live or BASE_ADAPTER, self.config.max_staleness)
        self.reports.step = start.step if start else 0
        number = card.metrics.get(CHANGE) if card is not None else None
        self.start = StartPoint(
            str(live) if live else "", card.name if card else "", None if number is None else int(number)
        )
        self.change = self.start.number or 0
        if start is not None and card is not None:
            self.rewards.restore(card.metrics)
            if self.has_other_rewards(card.metrics):
                _log.info("the rewards of %s are of another kind than before: their mean starts again", self.name)
                self.rewards.restart()
            self.evaluations.restore(card.metrics, self.name)
            best = await self.checkpoints.load_best()
            if best is None:  # its checkpoint is gone
                self.rewards.trend.forget_best()
                self.evaluations.forget_best()
            else:
                self.evaluations.restore_best(best.metrics)
            found = TrainedVersion(best.ref) if best else TrainedVersion(self.versions.latest, start, self._histories())
            self.checkpoints.set_best(found)
        elif live is None and not self._serves_base:
            async with self._undone_on_failure():
                ref = await self._stage()
                await self._adapters.flip(ref)
                self.versions.append(ref)
                self._undo = None
        self._emit("started", adapter=self.name, version=str(self.versions.latest), step=self.reports.step)

    def begin_lesson(self, pace: Pace) -> None:
        """Makes the next updates of rewards at this pace, until `end_lesson`. What was known of earlier rewards and
        answers is forgotten, because a lesson has other ones, and worse rewards than those would not be a fall."""
        self.pace = pace
        self._forget_rewards()

    def end_lesson(self) -> None:
        self.pace = Pace(self.config.update_frequency)
        self.plateau.restart()

    def _forget_rewards(self) -> None:
        """Later rewards and answers are not compared with those up to now, which had another policy or other tasks."""
        self.rewards.restart()
        self.watch.restart()
        self.plateau.restart()

    # -- an update -------------------------------------------------------------------------------

    async def mark_best(self) -> None:
        """Makes the latest version the best one if its rewards have raised the running mean to a new high. If versions
        are evaluated, that decides instead."""
        if not self.unpublished and self.rewards.trend.mark_best() and not self.evaluations.enabled:
            await self.set_best_to_latest()

    async def set_best_to_latest(self) -> None:
        """Makes the latest version the best one."""
        latest = self.versions.latest
        policy = None if latest == BASE_ADAPTER else await self._policy()
        self.checkpoints.set_best(TrainedVersion(latest, policy, self._histories()))

    def _histories(self) -> dict[str, float]:
        """What training needs after a restart, for the metrics of a checkpoint."""
        numbers = {REWARD_KEY: self._parts.reward_key, CHANGE: float(self.change)}
        return {**self.rewards.to_metrics(), **self.evaluations.to_metrics(), **numbers}

    def observed_rewards(self, update: PreparedUpdate) -> dict[str, float]:
        """The trend of rewards when this update began, for the journal."""
        return {**update.history.trend.observed(), REWARD_KEY: self._parts.reward_key}

    def has_other_rewards(self, written: Mapping[str, float]) -> bool:
        """Whether the rewards of a trend that was `written` cannot be compared with those of this process. An older
        version wrote no key; then they can."""
        return written.get(REWARD_KEY, self._parts.reward_key) != self._parts.reward_key

    @property
    def rewards_fell(self) -> bool:
        """Whether rewards have collapsed since that was last reported."""
        return self.watch.judge_rewards(self.rewards.trend) is not None

    def _can_roll_back(self) -> bool:
        best = self.checkpoints.best
        return best is not None and (self.unpublished or best.ref != self.versions.latest)

    def prepare(
        self, groups: Sequence[ScoredGroup], wanted: int | None = None, publish: bool = True, explores: bool = False
    ) -> PreparedUpdate:
        """An update on these groups, which all have the same signal; see `PreparedUpdate`."""
        rate = self.pace.learning_rate if signal_of(groups) in OF_LESSONS else None
        return prepare(groups, self.config.loss, self.rewards.draft(), wanted, publish, explores, rate)

    async def taught(self, update: PreparedUpdate) -> tuple[UpdateBatch, str]:
        """The batch of an update, with the logprobs of a teacher if its loss reads some, and with the limit of each
        key's share. The logprobs are asked for unless the update has them, and then it has.

        Returns:
            Also why the batch has no samples, if the teacher scored none of them.
        """
        problem = ""
        if update.teacher_logprobs is None:
            update.teacher_logprobs, problem = await logprobs_for(self._parts.teacher, update.batch, self.config.loss)
        batch = taught(update.batch, update.teacher_logprobs)
        owners = [group.owner for group in update.groups]
        batch, update.kept_shares = limited(batch, owners, self.config.loss)
        return batch, problem

    async def learn(
        self,
        batch: UpdateBatch,
        publish: bool = True,
        progress: Mapping[str, float] | None = None,
        again: bool = False,
    ) -> UpdateReport:
        """Makes one update. Unless the status of the report is published or trained, policy, versions and `progress`
        stay as they were.

        Args:
            publish: if it is False, no version is made of the update.
            again: the update was accepted before a crash, and is accepted again.

        Raises:
            Exception: raised by the learner or while publishing; policy and versions are as before.
        """
        loss, floor, evaluation = batch.loss or self.config.loss, self.config.gate.eval_floor, None
        evaluates_first = floor is not None and not again and self.evaluations.due(self.reports.step + 1)
        compares = loss.kind is LossKind.POLICY_GRADIENT

        def judge(outcome: UpdateOutcome) -> tuple[Divergence, ...]:
            return () if again else self.watch.judge(outcome.metrics, compares, outcome.skipped)

        stage = partial(self._stage_on_device, not evaluates_first, judge) if publish else None
        async with self._undone_on_failure():
            outcome, ref = await self._learner.learn(self.name, batch, stage)
            found = judge(outcome)
            self.watch.report(found, self.rewards.trend, self.live, self.reports.step)
            self.watch.observe(outcome.metrics, compares)
            if outcome.skipped:
                skipped = self.reports.skipped(self.live, outcome.skipped, metrics=outcome.metrics)
                return replace(skipped, divergences=found)
            refusal = refusal_of(found)
            if refusal is None and ref is not None and evaluates_first:
                evaluation = await self._evaluate(ref, outcome.step)
                refusal = refusal_of_evaluation(evaluation, floor)
            if evaluation is not None:
                outcome = replace(outcome, metrics={**outcome.metrics, **evaluation.metrics})
            if refusal is not None:
                return replace(self.reports.held(self.live, refusal, outcome), divergences=found)
            if ref is not None and evaluates_first:
                await self._adapters.flip(ref)
            self._undo = None
            self.checkpoints.unsaved.add()
            self.unpublished = ref is None
            self.progress = {**self.progress, **(progress or {})}
            if ref is not None:
                self.versions.append(ref)
            self.watch.accept(outcome.metrics, compares)
            report = self.reports.updated("published" if ref else "trained", ref or self.live, outcome)
            self._evaluated = evaluation
        return replace(report, divergences=found)

    def _stage_on_device(
        self,
        goes_live: bool,
        judge: Callable[[UpdateOutcome], Sequence[Divergence]],
        outcome: UpdateOutcome,
        weights: AdapterWeights,
    ) -> Future[AdapterRef] | None:
        """Stages an update as a new version if the gate accepts it. If `goes_live` is true, the version goes live as
        soon as it is staged. Called on the device thread, right after the update."""
        if outcome.skipped or refusal_of(judge(outcome)):
            return None
        return self._adapters.publish_trained(self.name, weights, self._info, self.versions.announce, goes_live)

    async def _stage(self) -> AdapterRef:
        """Stages a new version of the learner's policy, which is not live yet."""
        weights = self._learner.weights(self.name)  # they never leave the device
        version = await self._adapters.publish(self.name, weights, self._info, goes_live=False)
        self.versions.announce(version.ref)
        return version.ref

    async def _policy(self) -> PolicyState | PolicySnapshot:
        """The policy, after a pending undo has been done."""
        if self._undo is not None:
            await self._learner.restore(self.name, self._undo)
            self._undo = None
        return self._learner.state(self.name)

    @asynccontextmanager
    async def _undone_on_failure(self) -> AsyncIterator[None]:
        """At the end of the block, restores the policy and discards the version that was staged, unless the block has
        cleared `_undo`. So a cancelled update never goes live, whatever the device is doing for it."""
        self._undo = await self._policy()
        try:
            yield
        finally:
            if self._undo is not None:
                self._discard_announced()
                try:
                    await self._policy()
                except Exception:  # noqa: BLE001 - the block's own error is what the caller should see
                    _log.exception("the policy of %s could not be restored; it will be before its next use", self.name)

    def _discard_announced(self) -> None:
        """Forgets the version that was announced, unless it is in `versions`."""
        if (ref := self.versions.retract()) is not None:
            self._adapters.discard(ref)

    # -- rebuilding ------------------------------------------------------------------------------

    @asynccontextmanager
    async def rebuilding(self, origin: PolicySnapshot | None) -> AsyncIterator[None]:
        """Sets the policy to `origin`; None: to a new one. The block makes updates from it with `learn_again`, and ends
        with `replace`. If it does not get there, policy and versions are as before.

        Raises:
            InvalidRequestError: `origin` has another rank, alpha or targets than those configured.
        """
        async with self._undone_on_failure():
            await self._learner.restore(self.name, origin)
            yield

    async def learn_again(self, batch: UpdateBatch) -> UpdateOutcome:
        """Makes an update of a policy that is being rebuilt. No limit of divergence is applied."""
        outcome, _ = await self._learner.learn(self.name, batch, None)
        return outcome

    async def replace(
        self,
        rewards: RewardHistory,
        floor: float | None,
        continues: AdapterRef | None,
        commit: Callable[[CheckpointCard], Awaitable[None]],
    ) -> Refusal | None:
        """Makes the policy that was rebuilt the live version, unless its evaluation is below `floor`: staged,
        evaluated, saved, committed, flipped. Call this in the block of `rebuilding`.

        Args:
            rewards: what the updates that made it have left of rewards.
            continues: the last of the earlier versions whose trajectories may be trained on; None: all of them.
            commit: called with its checkpoint. What it raises is raised again, and all is as before.

        Returns:
            Why it does not go live; None: it is live.
        """
        ref, policy = await self._stage(), self._learner.state(self.name)
        step = policy.step
        result = await self._evaluate(ref, step) if self.evaluations.enabled else None
        if refusal := refusal_of_evaluation(result, floor) if self.evaluations.enabled else None:
            return refusal
        best, earlier = self.checkpoints.best, self.rewards
        self.checkpoints.set_best(None)  # it may have learnt what is forgotten
        self.rewards = rewards
        try:
            metrics = {**({} if result is None else result.metrics), **self._histories()}
            card = await self.checkpoints.save(ref, policy, metrics)
            if card.adapter != ref:  # an earlier version has the same policy, and its checkpoint other metrics
                card = await self.checkpoints.save(ref, policy, metrics, step=self.checkpoints.next_step)
            await commit(card)
        except BaseException:  # a cancelled caller too
            self.rewards = earlier
            self.checkpoints.set_best(best)
            raise
        self._undo, self.unpublished = None, False
        await self._adapters.flip(ref)
        if continues is not None:
            self.versions.rewind_to(continues)
        self.versions.append(ref)
        self._forget_rewards()
        self.evaluations.forget_best()
        self.reports.step, self._evaluated = step, result
        await self.evaluate_if_due()
        return None

    # -- evaluation ------------------------------------------------------------------------------

    async def evaluate_if_due(self, early: bool = False) -> EvaluationResult | None:
        """Evaluates the live version of training if that is due. If it fails, the next attempt is due later.

        Call this when the last update has its number and its rewards are in the history: if the version is the best
        one, its checkpoint says that it contains both.

        `early`: evaluates it even if it is not due yet, unless it was evaluated before.

        Returns:
            The evaluation, also one that the gate has read before; None if it was not due, or has failed.
        """
        version, step = self.versions.latest, self.reports.step
        result, self._evaluated = self._evaluated, None
        if result is None or result.adapter != version:
            due = self.evaluations.due(step) or (early and self.evaluations.lacks(version))
            if self.unpublished or not due:
                return None
            result = await self._evaluate(version, step)
        if result is None:
            self.evaluations.postpone(step)
        elif self.evaluations.add(result):
            await self.set_best_to_latest()
        return result

    def _evaluate(self, version: AdapterRef, step: int) -> Awaitable[EvaluationResult | None]:
        return self.evaluations.evaluate(version, step, self._adapters.lease(TrainedVersion(version).selector))

    # -- checkpoints -----------------------------------------------------------------------------

    def number_versions_from(self, least: int) -> None:
        """The next version gets at least this number."""
        self._adapters.number_from(self.name, least)

    async def save_if_due(self, now: bool = False) -> str | None:
        """Saves a checkpoint if one is due, or `now`, and returns its name. If that fails, the next attempt is due
        later."""
        if self.checkpoints.unsaved.due_in != 0 and not now:
            return None
        try:
            return (await self.save()).name
        except Exception:  # noqa: BLE001 - it is logged already, and the update itself is live
            self.checkpoints.unsaved.postpone()
            return None

    async def close(self) -> None:
        """Saves updates that no checkpoint has. If some are in no published version, a version of them goes live before
        that, because the next `open` continues from the live version. Raises what `publish_again` and `save` raise."""
        if self.unpublished:
            await self.publish_again()
            await self._save_latest()
        elif self.checkpoints.unsaved.lost:
            await self.save()
        if card := self.checkpoints.newest_of(self.live):
            _log.info("%s is saved in %s", card.adapter, card.path)

    async def save(
        self, step: int | None = None, tags: Sequence[str] = (), metrics: Mapping[str, float] | None = None
    ) -> CheckpointCard:
        """Saves the policy with the optimizer's state as a checkpoint of its version. If the policy has no version,
        because it is not published or still equals the base model, one is staged for the checkpoint.

        `metrics`: saved in place of those of the last update, if there are any.

        Raises:
            ConflictError: there is another checkpoint of `step`.
            StorageError: the disk failed, for the checkpoint or for the journal.
            Exception: see `PolicyCheckpoints.save`.
        """
        await self.journal.flush()  # a checkpoint never has an update that the journal lacks
        policy = await self._policy()
        metrics = {**(metrics or self.reports.metrics), **self._histories()}
        has_version = not self.unpublished and self.versions.latest != BASE_ADAPTER
        try:
            ref = self.versions.latest if has_version else await self._stage()
            card = await self.checkpoints.save(ref, policy, metrics, tags, step)
            if not has_version:
                self.versions.add_saved(card.adapter)
            self.journal.compact(self.name, self._covered(card), self.plateau.remembered_ids)
            return card
        finally:
            self._discard_announced()

    async def _save_latest(self) -> None:
        """Saves the latest version in a checkpoint of its own, even if an earlier version has the same policy."""
        await self.save()
        if self.checkpoints.newest_of(self.versions.latest) is None:
            await self.save(self.checkpoints.next_step)

    def _covered(self, saved: CheckpointCard) -> int:
        """The last change that every checkpoint has from which training may resume: those without a tag, which go when
        there are newer ones, and the one that was `saved`. A rollback to one with a tag needs no later change. Those of
        older versions do not say it, and training resumes from them without the journal."""
        cards = [saved, *(card for card in self.checkpoints.cards() if not card.tags)]
        return int(min((card.metrics[CHANGE] for card in cards if CHANGE in card.metrics), default=0))

    # -- rollback --------------------------------------------------------------------------------

    async def roll_back(self, to: str | None) -> AdapterRef:
        """Makes an earlier version live and continues training from it.

        `to`: name or tag of a checkpoint; None: the best version.

        Raises:
            ConflictError: there is no best version.
            UnknownModelError: there is no such checkpoint.
            AdapterFileError: the checkpoint cannot be used.
            Exception: raised by the learner or while publishing; policy and versions are as before.
        """
        goal = await self.checkpoints.find(to)
        with self._adapters.lease(goal.selector):
            async with self._undone_on_failure():
                await self._learner.restore(self.name, goal.policy)
                # the base model is no version of the adapter: in its place, a new version that equals it goes live
                ref = goal.ref if goal.ref != BASE_ADAPTER else await self._stage()
                await self._adapters.flip(ref)
                self.versions.rewind_to(goal.ref)
                if ref != goal.ref:
                    self.versions.append(ref)
                self._undo = None
            self.unpublished = False
            self._forget_rewards()
            self.reports.step = goal.policy.step if goal.policy else 0
            self._emit("rollback", adapter=self.name, version=str(ref), step=self.reports.step)
            await self._resume_from(ref, best=to in (None, BEST))
        return ref

    async def publish_again(self) -> AdapterRef:
        """Makes a new version live that equals the policy, and training continues from it. A cluster needs it after a
        rollback, because its nodes take no version whose number is lower than one that they have had.

        Raises:
            Exception: raised while publishing; policy and versions are as before.
        """
        async with self._undone_on_failure():
            ref = await self._stage()
            await self._adapters.flip(ref)
            self.versions.append(ref)
            self._undo, self.unpublished = None, False
        return ref

    async def _resume_from(self, ref: AdapterRef, best: bool) -> None:
        """Makes a restart of the server resume from this version. If it is the best one, it is saved, because it may
        have no checkpoint yet."""
        if best:
            self.checkpoints.set_best(TrainedVersion(ref, await self._policy(), self._histories()))
            self.checkpoints.unsaved.add()
            with suppress(Exception):  # `save` has logged it, and the next checkpoint saves the best version again
                await self._save_latest()
        else:
            self.checkpoints.unsaved.clear()
        if card := self.checkpoints.newest_of(ref):
            await self.checkpoints.set_latest(card.name)
