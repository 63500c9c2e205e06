"""PolicyJournal: writes the changes of one adapter's policy into the journal, and makes them again after a crash."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.config import LossKind, ResolvedLoss, ResolvedTraining
from mlx_parallm.core.adapters import BASE_ADAPTER, BEST, AdapterRef
from mlx_parallm.core.requests import Signal
from mlx_parallm.core.trajectories import GivenTrajectory, Trajectory
from mlx_parallm.errors import ConflictError, EngineError, ParaLLMError, RequestError
from mlx_parallm.rl.objectives import PreparedUpdate, ScoredGroup, TeacherLogprobs, prepare
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.runs.journal import changed
from mlx_parallm.rl.runs.lineage import is_replaced
from mlx_parallm.rl.runs.records import (
    CHANGED,
    LearningSettings,
    PolicyChange,
    Rollback,
    Start,
    TrainedEpisode,
    TrainedGroup,
    Update,
    settings_to_json,
)
from mlx_parallm.rl.runs.replay import Replay, plan
from mlx_parallm.rl.runs.store import Statements
from mlx_parallm.rl.shares import limited
from mlx_parallm.rl.status import UpdateReport
from mlx_parallm.rl.teachers import taught
from mlx_parallm.rl.trajectories import DropReason, Episode
from mlx_parallm.rl.updates.adapter_training import CHANGE, AdapterTraining
from mlx_parallm.train.data import UpdateSettings

_LINEAGE = 100
"""Versions of a lineage that are kept. Trajectories of older ones are too stale to be trained on."""

_log = logging.getLogger(__name__)


class PolicyJournal:
    """The changes of one adapter's policy. The lock of `AdapterRun` orders the calls.

    Methods that write raise StorageError if a change is not on the disk yet; it is written later.
    """

    def __init__(self, training: AdapterTraining, config: ResolvedTraining) -> None:
        self._training = training
        self._config = config
        self._journal = training.journal
        self._last: int | None = None  # number of the last change; None before `open`
        self._start: PolicyChange | None = None  # written before the next change
        self._settings, self._unwritten_settings = settings_to_json(
            LearningSettings(config.seed, UpdateSettings.of(config))
        )

    async def flush(self) -> None:
        """See `Journal.flush`."""
        await self._journal.flush()

    def begin(self) -> None:
        """Call this before a checkpoint is saved, which may be before the first change."""
        if self._unwritten_settings:
            self._journal.configured(self._settings, self._unwritten_settings)
            self._unwritten_settings = ""
        if self._start is not None:
            self._journal.started(self._start)
            self._start = None

    # -- writing ---------------------------------------------------------------------------------

    async def updated(
        self,
        update: PreparedUpdate,
        reasons: Sequence[DropReason | None],
        report: UpdateReport,
    ) -> None:
        """An update has ended. `reasons`: why each of its groups was not trained on; None: it was.

        Its history of rewards counts if it has changed the policy, or has no signal that could. If neither policy nor
        baselines have changed, the update is kept without its groups.
        """
        changed = report.status in CHANGED
        moved = (changed or report.reason == "no_signal") and self._training.rewards.accept(update.history)
        published = report.status == "published" and report.adapter is not None
        trained = tuple(map(_trained, update.groups))
        dropped = {
            one: reason.value
            for group, reason in zip(trained, reasons, strict=True)
            if reason is not None
            for one in group.trajectory_ids
        }
        await self._changed(
            Update(
                groups=trained if changed or moved else (),
                wanted=update.wanted,
                publish=update.publish,
                version=report.adapter.version if published and report.adapter is not None else None,
                status=report.status,
                step=report.step,
                metrics=dict(report.metrics),
                progress=dict(self._training.progress),
                learning_rate=update.batch.learning_rate,
                explores=update.explores,
                teacher_logprobs=update.teacher_logprobs if changed else None,
                trend=self._training.observed_rewards(update),
                all_progress=True,
                settings=self._settings,
                owners=owners_of(update.groups),
            ),
            dropped,
        )

    async def check_rollback(self, to: str | None) -> None:
        """Checks before a rollback that the policy has nothing that was forgotten since. `to`: see
        `AdapterTraining.roll_back`. Raises ConflictError: it has."""
        cards = self._training.checkpoints.cards()
        card = next((each for each in cards if (to or BEST) in (each.name, *each.tags)), None)
        if card is None:
            return
        changes = await self._journal.read(lambda file: file.rollbacks(card.adapter.name)) or ()
        if is_replaced(changes, card.name, card.metrics.get(CHANGE, 0)):
            raise ConflictError(
                f"{card.name} has learnt from what was forgotten since: export it, or name a later checkpoint.",
                param="to",
            )

    async def rolled_back(self) -> None:
        """The policy is now the one of the live version."""
        card = self._training.checkpoints.newest_of(self._training.live)
        training = self._training
        baselines = training.rewards.baselines()
        await self._changed(Rollback(card.name if card else "", training.versions.last(_LINEAGE), baselines))

    async def rebuilt(
        self,
        card: CheckpointCard,
        first: int,
        continues: AdapterRef | None,
        edits: Statements,
    ) -> None:
        """The policy is now the one in this checkpoint, made of the updates up to now without forgotten data. In the
        same commit, `edits` takes these out of the updates.

        Args:
            first: number of the first update that was made again.
            continues: see `AdapterTraining.replace`.

        Raises:
            StorageError: neither is on the disk, nor will be.
        """
        training, earlier = self._training, self._training.versions.last(_LINEAGE)
        if continues is not None:
            earlier = earlier[: earlier.index(str(continues)) + 1] if str(continues) in earlier else (str(continues),)
        baselines = training.rewards.baselines()
        self.begin()
        body = Rollback(card.name, (*earlier, str(card.adapter)), baselines, rebuilt=first)
        change = PolicyChange(training.name, training.change + 1, time.time(), body)
        await self._journal.rewrite([*changed(change), *edits])
        self._last = training.change = change.number

    async def _changed(self, body: Rollback | Update, dropped: Mapping[str, str] = MappingProxyType({})) -> None:
        self.begin()
        await self._journal.changed(self._numbered(body), dropped)

    def _numbered(self, body: Start | Rollback | Update) -> PolicyChange:
        self._last = self._training.change = self._training.change + 1
        return PolicyChange(self._training.name, self._last, time.time(), body)

    # -- after a crash ---------------------------------------------------------------------------

    async def open(self) -> None:
        """Call this when training was opened. The first time, it makes the updates again that a crash has undone.

        Raises:
            ConfigError: the journal is damaged.
            StorageError: it cannot be written.
        """
        if self._last is None:
            await self._recover()
        else:  # training has started again from another version
            self._training.change = self._last
            self._start = self._numbered(self._started())

    async def _recover(self) -> None:
        """Brings the policy from its last checkpoint to where it was when the process ended, and saves it."""
        training = self._training
        changes = await self._journal.read(lambda file: file.changes_since(training.name, training.start.number or 0))
        recovery = plan(changes or (), training.start)
        training.progress = await self._journal.read(lambda file: file.progress(training.name)) or {}
        if training.start.live not in recovery.lineage:
            self._note_version(changes or ())
        if not await self._rolled_back_to(recovery.roll_back_to):
            recovery = Replay(recovery.last, lost=len(recovery.updates), is_new=True)
        training.versions.continue_from([ref_of(version) for version in recovery.lineage])
        if recovery.baselines is not None:
            training.rewards.restart()  # as the rollback did; the checkpoint may be older than it
            training.rewards.restore_baselines(recovery.baselines)
        training.watch.restart(recovery.recent)
        if recovery.lost:
            _log.warning(
                "%d updates of %s are lost: what they started from is not here any more", recovery.lost, training.name
            )
        if made := [change for change in recovery.updates if isinstance(change.body, Update) and change.body.groups]:
            _log.info("making %d updates of %s again, which no checkpoint has", len(made), training.name)
        settings = await self._journal.read(lambda file: file.settings() if recovery.updates else {}) or {}
        for change in recovery.updates:
            await self._make_again(change, settings)
        newest = await self._journal.read(lambda file: file.newest_version(training.name)) or 0
        training.number_versions_from(newest + 1)
        self._last = training.change = recovery.last
        if recovery.is_new:
            self._start = self._numbered(self._started())
        elif made:  # otherwise a checkpoint would have nothing new
            await training.save_if_due(now=True)

    def _started(self) -> Start:
        """Where training has started, and the first version if this start has made one."""
        base, live = self._training.start.live, self._training.live
        return Start(base, "" if live is None or base else str(live))

    def _note_version(self, changes: Sequence[PolicyChange]) -> None:
        """Notes in the journal that the last change in the checkpoint has the live version, if it has none: this start
        has made it live, and later ones continue from it."""
        live, number = self._training.live, self._training.start.number
        change = next((each for each in changes if each.number == number), None)
        if live is None or change is None:
            return
        match change.body:
            case Update(version=None) as body:
                self._journal.started(replace(change, body=replace(body, version=live.version)))
            case Start(made="") as body:
                self._journal.started(replace(change, body=replace(body, made=str(live))))

    async def _rolled_back_to(self, checkpoint: str) -> bool:
        """Restores a checkpoint, unless the name is empty. Returns whether it could be."""
        try:
            if checkpoint:
                await self._training.roll_back(checkpoint)
        except RequestError as error:
            _log.warning("%s of %s cannot be restored: %s", checkpoint, self._training.name, error)
            return False
        return True

    async def _make_again(self, change: PolicyChange, settings: Mapping[str, LearningSettings]) -> None:
        """One update, as it was, with its own settings. If it fails, it is left out. `settings`: by their digest."""
        training, update = self._training, change.body
        assert isinstance(update, Update)
        known = await self._journal.read(lambda file: file.trajectories(update.trajectory_ids)) or {}
        try:
            groups = [scored_group(group, known) for group in update.groups]
            self._observe(update, groups)
            made = self._prepared(update, groups, settings)
            await training.mark_best()
            if not update.changed_policy:
                training.rewards.accept(made.history)
                training.change = change.number
                return
            await training.evaluate_if_due()  # the version that training starts from
            if update.version is not None:
                training.number_versions_from(update.version)
            batch, problem = await training.taught(made)
            if not batch.samples:
                raise EngineError(problem or "under the present settings it has no samples")
            report = await training.learn(batch, update.publish, update.progress or None, again=True)
        except (ParaLLMError, LookupError) as error:
            _log.error("update %d of %s could not be made again: %s", change.number, training.name, error)
            return
        training.change = change.number
        if report.status in CHANGED:
            training.rewards.accept(made.history)
            if report.status == "published":
                await training.evaluate_if_due()
        else:
            _log.warning("update %d of %s, made again, is %s", change.number, training.name, report.status)

    def _prepared(
        self, update: Update, groups: Sequence[ScoredGroup], settings: Mapping[str, LearningSettings]
    ) -> PreparedUpdate:
        """An update with the settings that it was made with, or the present ones if an older version wrote it."""
        named = settings.get(update.settings)
        own = named.update if named is not None else UpdateSettings.of(self._config)
        history, rate = self._training.rewards.draft(), update.learning_rate
        made = prepare(groups, own.loss, history, update.wanted, update.publish, update.explores, rate)
        loss = made.batch.loss or own.loss
        made.batch = replace(made.batch, loss=loss, settings=own)
        made.teacher_logprobs = update.teacher_logprobs if loss.reads_teacher else None
        return made

    def _observe(self, update: Update, groups: Sequence[ScoredGroup]) -> None:
        """Brings the trend of rewards to where it was when the update began."""
        trend = self._training.rewards.trend
        if update.trend is not None:
            if not self._training.has_other_rewards(update.trend):
                trend.continue_from(update.trend)
            return
        for group, trained in zip(groups, update.groups, strict=True):  # an older version wrote it
            collected = group.signal is Signal.REWARDS and not (trained.is_given or trained.remembered)
            if group.rewards and collected and self._config.loss.kind is not LossKind.SFT:
                trend.observe(group.scorer, fmean(group.rewards), group.on_policy)


def owners_of(groups: Sequence[ScoredGroup]) -> tuple[str | None, ...]:
    """The owners of the trajectories of these groups, each once."""
    turns = (turn for group in groups for episode in group.episodes for turn in episode.turns)
    return tuple(sorted({turn.owner for turn in turns}, key=lambda owner: (owner is None, owner)))


def ref_of(version: str) -> AdapterRef:
    """A version of a lineage, from its text; of an empty one, the base model."""
    name, _, number = version.rpartition("@")
    return AdapterRef(name, int(number)) if name and name != BASE_ADAPTER.name else BASE_ADAPTER


def _trained(group: ScoredGroup) -> TrainedGroup:
    episodes = tuple(map(_trained_episode, group.episodes))
    return TrainedGroup(
        episodes, group.rewards, group.scorer, group.staleness, group.on_policy, group.signal, group.remembered
    )


def _trained_episode(episode: Episode) -> TrainedEpisode:
    given = tuple(turn for turn in episode.turns if isinstance(turn, GivenTrajectory))
    ids = tuple(turn.trajectory_id for turn in episode.turns if isinstance(turn, Trajectory))
    return TrainedEpisode(ids, tuple(episode.token_rewards), given)


def scored_group(group: TrainedGroup, known: Mapping[str, Trajectory]) -> ScoredGroup:
    """Raises KeyError: the journal lacks one of its trajectories."""
    episodes = tuple(
        Episode(episode.given or tuple(known[one] for one in episode.trajectory_ids), episode.token_rewards)
        for episode in group.episodes
    )
    return ScoredGroup(
        episodes, group.rewards, group.scorer, group.staleness, group.on_policy, group.signal, group.remembered
    )


def prepared_as_made(
    body: Update,
    groups: Sequence[ScoredGroup],
    loss: ResolvedLoss,
    rewards: RewardHistory,
    teacher_logprobs: TeacherLogprobs | None,
) -> PreparedUpdate:
    """An update of the past with the batch that it had learnt from: with the teacher's logprobs and the limits of keys.

    Args:
        groups: its groups, or those that are left of them.
        loss: that it was made with.
        rewards: those before it.
        teacher_logprobs: of the samples of these groups.

    Raises:
        EngineError: the logprobs are not of these samples.
    """
    update = prepare(groups, loss, rewards.draft(), body.wanted, body.publish, body.explores, body.learning_rate)
    update.teacher_logprobs = teacher_logprobs
    batch, update.kept_shares = limited(taught(update.batch, teacher_logprobs), [group.owner for group in groups], loss)
    update.batch = batch
    return update
