"""Rebuild: the updates of an adapter, made again without what is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace

from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import ConflictError
from mlx_parallm.extras.forgetting.forgotten import Forgotten
from mlx_parallm.extras.forgetting.plan import RebuildPlan, without
from mlx_parallm.rl.objectives import PreparedUpdate, prepare
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.runs.records import LearningSettings, PolicyChange, Start, TrainedEpisode, TrainedGroup, Update
from mlx_parallm.rl.runs.store import JournalFile
from mlx_parallm.rl.updates.adapter_training import AdapterTraining
from mlx_parallm.rl.updates.recovery import owners_of, prepared_as_made, scored_group

_Known = Mapping[str, Trajectory]


class Rebuild:
    """Makes the updates of a plan again, in order, as they were but for what is forgotten.

    An update of which nothing is left makes no step, and one that was rolled back moves the baselines of rewards only.
    Limits of divergence, which had accepted the updates, are not applied.

    Attributes:
        plan: what is made again, and from where.
        rewards: what the updates up to now have left of rewards.
        edited: by number, the records of the updates from which something was removed.
        episodes: those that were left out.

    Args:
        file: the journal, which is read as updates need it.
        worker: reads it.
        present: the settings of updates that name none, because an older version wrote them.
    """

    def __init__(
        self,
        plan: RebuildPlan,
        forgotten: Forgotten,
        file: JournalFile,
        worker: Executor,
        present: LearningSettings,
    ) -> None:
        self.rewards = RewardHistory()
        self.edited: dict[int, Update] = {}
        self.episodes = 0
        self.forgotten = forgotten
        self.plan = plan
        self._file, self._worker, self._present = file, worker, present
        self._settings: Mapping[str, LearningSettings] = {}

    async def run(self, training: AdapterTraining, on_update: Callable[[int], None]) -> None:
        """Makes the policy in training, which is the plan's origin, what it is without what is forgotten.

        `on_update`: called with the number of updates that were made again so far.

        Raises:
            ConflictError: the journal lacks what an update has learnt from, or a new policy was made of another seed.
        """
        loop = asyncio.get_running_loop()
        self._settings = await loop.run_in_executor(self._worker, self._file.settings)
        plan = self.plan
        if plan.origin is not None:
            self.rewards.restore(plan.origin.metrics)
        elif not plan.base and (updates := [each for each in plan.changes if isinstance(each.body, Update)]):
            self._check_seed(updates[0])
        for done, change in enumerate(plan.changes):
            on_update(done)
            if isinstance(change.body, Start):
                self.rewards = RewardHistory()  # training that starts from elsewhere knows no earlier ones
                continue
            update = await loop.run_in_executor(self._worker, self._prepared, change)
            if update is None:
                continue
            is_learnt = change.number in plan.learnt and update.batch.teaches
            if not is_learnt or not (await training.learn_again(update.batch)).skipped:
                self.rewards.accept(update.history)

    def _check_seed(self, first: PolicyChange) -> None:
        seed = self._settings_of(first).seed
        if seed != self._present.seed:
            raise ConflictError(
                f"{first.adapter} began as a new adapter of the seed {seed}, and rl_training.seed is "
                f"{self._present.seed} now: start the server with --seed {seed} to build it anew."
            )

    def _settings_of(self, change: PolicyChange) -> LearningSettings:
        assert isinstance(change.body, Update)
        return self._settings.get(change.body.settings, self._present)

    def _prepared(self, change: PolicyChange) -> PreparedUpdate | None:
        """An update without what is forgotten; None: nothing is left of it."""
        assert isinstance(change.body, Update)
        body, known = change.body, self._file.trajectories(change.body.trajectory_ids)
        groups, gone = without(change, self.forgotten, lambda episode: self._is_later(change, episode, known))
        settings = self._settings_of(change).update
        try:
            scored = [scored_group(group, known) for group in groups]
            logprobs = body.teacher_logprobs if not gone else self._teacher_logprobs(change, groups, known)
        except KeyError as error:
            raise ConflictError(
                f"Trajectory {error.args[0]} of update {change.number} is gone from the journal, so {change.adapter} "
                "cannot be built anew."
            ) from error
        if gone:
            self.episodes += gone
            self.edited[change.number] = replace(
                body,
                groups=tuple(groups),
                teacher_logprobs=logprobs,
                owners=owners_of(scored),
                forgotten=body.forgotten + gone,
            )
        if not scored:
            return None
        update = prepared_as_made(body, scored, settings.loss, self.rewards, logprobs)
        update.batch = replace(update.batch, settings=settings)
        return update

    def _is_later(self, change: PolicyChange, episode: TrainedEpisode, known: _Known) -> bool:
        """Whether a version that had learnt from what is forgotten has sampled an episode, or may have."""
        if not self.forgotten.spec.from_scratch or change.number < self.plan.affected[0]:
            return False
        versions = [given.adapter for given in episode.given]
        versions += [known[one].adapter for one in episode.trajectory_ids if one in known]
        return any(v is None or (v.name == change.adapter and v.version in self.plan.tainted) for v in versions)

    def _teacher_logprobs(
        self, change: PolicyChange, groups: list[TrainedGroup], known: _Known
    ) -> tuple[tuple[float, ...], ...] | None:
        """What the teacher has said of the samples that are left. Equal tokens have equal logprobs."""
        assert isinstance(change.body, Update)
        if change.body.teacher_logprobs is None:
            return None
        loss = self._settings_of(change).update.loss
        whole, rest = (
            prepare([scored_group(group, known) for group in some], loss, RewardHistory()).batch.samples
            for some in (change.body.groups, groups)
        )
        tokens = ((each.token_ids, each.loss_weights) for each in whole)
        said = dict(zip(tokens, change.body.teacher_logprobs, strict=True))
        return tuple(said[each.token_ids, each.loss_weights] for each in rest)
