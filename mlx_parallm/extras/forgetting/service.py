"""Forgetting builds adapters anew without some of what they have learnt from, and removes what is kept of that.

    begin ─▶ intent on the disk ─▶ for each adapter: rebuild ─▶ one commit: the new policy, the journal without it
                                                      │          ─▶ live ─▶ remove: checkpoints, log, caches
                                                      └─ held: nothing changes
A process that ends on the way goes on at its next start: the intent is in the journal until all is removed. Requests
are answered all the time; the updates of the adapter wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.adapters.runs import JOURNAL
from mlx_parallm.app.build import Served
from mlx_parallm.config import CheckpointingConfig, Config
from mlx_parallm.core.adapters import BASE_ADAPTER, BEST, AdapterRef
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.errors import ConflictError, ParaLLMError, StorageError, UnknownTrajectoryError
from mlx_parallm.extras.forgetting.cards import AdapterPart, ForgetCard, ForgetPlan
from mlx_parallm.extras.forgetting.forgotten import ForgetSpec, Forgotten, find, removal
from mlx_parallm.extras.forgetting.plan import Outdated, RebuildPlan, outdated, plan, tainted
from mlx_parallm.extras.forgetting.rebuild import Rebuild
from mlx_parallm.rl.runs.records import LearningSettings, Update
from mlx_parallm.rl.runs.store import JournalFile, Statements
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.trajectories import DropReason
from mlx_parallm.rl.trajectory_log import Wanted, count_lines
from mlx_parallm.rl.updates.adapter_training import AdapterTraining
from mlx_parallm.rl.updates.recovery import PolicyJournal, ref_of
from mlx_parallm.train.data import UpdateSettings
from mlx_parallm.train.policy import PolicySnapshot

T = TypeVar("T")

_SET = "INSERT OR REPLACE INTO about (name, value) VALUES ('forgetting', ?)"
_CLEAR = "DELETE FROM about WHERE name = 'forgetting'"
_READ = "SELECT value FROM about WHERE name = 'forgetting'"
"""The row of the journal that says what is still to be forgotten."""

_log = logging.getLogger(__name__)


class Forgetting:
    """Forgets one thing at a time. Event loop's thread only.

    Args:
        journal: the journal's file.
        checkpointing: says which checkpoints are removed.
    """

    def __init__(
        self,
        training: TrainingService,
        engine: EngineClient,
        checkpointing: CheckpointingConfig,
        journal: Path,
    ) -> None:
        self._training, self._engine = training, engine
        self._rule, self._journal = checkpointing.remove_forgotten, journal
        self._card = ForgetCard()
        self._task: asyncio.Task[None] | None = None

    @property
    def card(self) -> ForgetCard:
        """What is being forgotten, or was last."""
        return self._card

    # -- before ----------------------------------------------------------------------------------

    async def plan(self, spec: ForgetSpec) -> ForgetPlan:
        """What would be done, without doing it. Raises UnknownTrajectoryError: a trajectory is not in the journal."""
        found = await self._find(spec)
        return ForgetPlan(str(spec), tuple([await self._part(name, each) for name, each in found.items()]), self._rule)

    async def begin(self, spec: ForgetSpec, ignore_floor: bool = False) -> ForgetCard:
        """Begins to forget, when that is on the disk.

        Args:
            ignore_floor: adapters go live even if their evaluation is below `gate.eval_floor`.

        Raises:
            UnknownTrajectoryError: a trajectory is not in the journal.
            ConflictError: something else is being forgotten, an adapter cannot be built anew, it is not in training,
                or two of its versions are being compared.
            StorageError: it could not be written.
        """
        if self._task is not None:
            raise ConflictError("Something is being forgotten already; GET /v1/training/forget shows it.")
        found = await self._find(spec)
        for name in found:
            self._training.loop(name)
            self._training.check_changeable(name)
        for part in [await self._part(name, each) for name, each in found.items()]:
            if part.problem:
                raise ConflictError(part.problem)
        await self._note(spec, found, ignore_floor)
        self._spawn(spec, found, ignore_floor)
        return self._card

    def _spawn(self, spec: ForgetSpec, found: Mapping[str, Forgotten], ignore_floor: bool) -> None:
        self._card = ForgetCard("rebuilding" if found else "done", str(spec))
        self._task = self._training.changes.spawn(self._forget(spec, found, ignore_floor))

    async def _find(self, spec: ForgetSpec) -> dict[str, Forgotten]:
        found = await self._read(partial(find, spec=spec))
        unknown = set(spec.trajectory_ids) - {one for each in found.values() for one in each.ids}
        if unknown:
            raise UnknownTrajectoryError(
                f"The journal has no trajectory {sorted(unknown)[0]!r}.", param="trajectory_ids"
            )
        return found

    async def _part(self, name: str, forgotten: Forgotten) -> AdapterPart:
        changes, cards = await self._read(lambda file: file.changes(name)), self._training.parts.checkpoints.cards(name)
        log, lines = self._training.parts.config.trajectory_log, 0
        if log is not None:
            lines = await asyncio.to_thread(count_lines, log, _of(forgotten))
        part = AdapterPart(name, len(forgotten.ids), log_lines=lines)
        try:
            steps = plan(name, changes, cards, forgotten)
        except ConflictError as error:
            return replace(part, problem=str(error))
        if steps is None:
            return part
        old = tainted(cards, steps.affected[0])
        going = [card for card in old if self._removes(card)]
        again = [change.body for change in steps.changes if change.number in steps.learnt]
        return replace(
            part,
            updates=len(steps.affected),
            again=len(again),
            starts_from=steps.origin.name if steps.origin is not None else steps.base or "a new adapter",
            seconds=sum(body.metrics.get("seconds", 0.0) for body in again if isinstance(body, Update)),
            removed=tuple(card.name for card in going),
            kept=tuple(card.name for card in old if card not in going),
        )

    def _removes(self, card: CheckpointCard) -> bool:
        """Whether the operator's rule lets a checkpoint go that has learnt from what is forgotten."""
        tags = [tag for tag in card.tags if tag not in (BEST, "latest")]
        return self._rule == "all" or (self._rule == "untagged" and not tags)

    # -- the work --------------------------------------------------------------------------------

    async def resume(self) -> None:
        """Goes on with what the last process did not finish. Call this when training has started."""
        stored = await self._training.parts.journal.read(lambda file: file.rows(_READ))
        if not stored:
            return
        intent = json.loads(stored[0][0])
        spec = ForgetSpec(**{**intent["spec"], "trajectory_ids": tuple(intent["spec"]["trajectory_ids"])})
        found = {name: Forgotten(spec, frozenset(ids)) for name, ids in intent["found"].items()}
        _log.info("%s is forgotten, as the last process has begun", spec)
        self._spawn(spec, found, intent["ignore_floor"])

    async def _forget(self, spec: ForgetSpec, found: Mapping[str, Forgotten], ignore_floor: bool) -> None:
        left = dict(found)
        try:
            for name, forgotten in found.items():
                refusal = await self._forget_of(name, forgotten, ignore_floor)
                if refusal:
                    await self._training.parts.journal.rewrite(lambda _: [(_CLEAR, [()])])
                    self._card = replace(self._card, state="held", reason=refusal)
                    return
                del left[name]
                await self._note(spec, left, ignore_floor)
            self._card = replace(self._card, state="done")
        except asyncio.CancelledError:
            raise
        except ParaLLMError as error:
            _log.error("%s was not forgotten: %s; the next start tries it again", spec, error)
            self._card = replace(self._card, state="failed", reason=str(error))
        finally:
            self._task = None

    async def _forget_of(self, name: str, forgotten: Forgotten, ignore_floor: bool) -> str:
        """Forgets what one adapter has learnt. Returns why its gate holds it; empty: it is done."""
        loop, cards = self._training.loop(name), self._training.parts.checkpoints.cards
        with closing(JournalFile(self._journal, read_only=True)) as file:
            steps = plan(name, await asyncio.to_thread(file.changes, name), cards(name), forgotten)
            work = partial(self._replace, name, steps, forgotten, file, ignore_floor)
            if refusal := await loop.rebuild(work):
                return refusal
        self._card = replace(self._card, state="removing", adapter=name)
        changes = await self._read(lambda file: file.changes(name))
        await self._remove(name, forgotten, outdated(changes, cards(name)))
        return ""

    async def _replace(
        self,
        name: str,
        steps: RebuildPlan | None,
        forgotten: Forgotten,
        file: JournalFile,
        ignore_floor: bool,
        training: AdapterTraining,
        changes: PolicyJournal,
    ) -> str:
        """Replaces the policy, if it has learnt from what is forgotten, and removes that from the journal and from
        memory, so that no update takes it. Returns why the gate holds it."""
        journal = self._training.parts.journal
        if steps is None:
            await journal.rewrite(lambda _: removal(name, forgotten, {}))
        else:
            present = LearningSettings(training.config.seed, UpdateSettings.of(training.config))
            floor = None if ignore_floor else training.config.gate.eval_floor
            rebuild = Rebuild(steps, forgotten, file, present)
            async with training.rebuilding(await _origin(steps, training)):
                await rebuild.run(training, partial(self._progress, name, len(steps.changes)))
                commit = partial(self._commit, steps, rebuild, changes, name)
                refusal = await training.replace(rebuild.rewards, floor, steps.continues, commit)
                if refusal is not None:
                    return refusal.reason
            made = {"updates": len(steps.learnt), "episodes": rebuild.episodes, "version": str(training.live)}
            self._training.emit("forgotten", adapter=name, **made)
        self._training.trajectories.buffer.remove(forgotten.ids, DropReason.FORGOTTEN)
        return ""

    async def _commit(
        self, steps: RebuildPlan, rebuild: Rebuild, changes: PolicyJournal, name: str, card: CheckpointCard
    ) -> None:
        def edits(_: JournalFile) -> Statements:
            return removal(name, rebuild.forgotten, rebuild.edited)

        try:
            await changes.rebuilt(card, steps.affected[0], steps.continues, edits)
        except StorageError:
            await self._training.parts.checkpoints.remove(name, [card.name])
            raise

    def _progress(self, adapter: str, updates: int, done: int) -> None:
        self._card = replace(self._card, adapter=adapter, done=done, updates=updates)

    # -- after -----------------------------------------------------------------------------------

    async def _remove(self, name: str, forgotten: Forgotten, old: Outdated) -> None:
        """Removes what is kept of it outside the journal, and what the journal has noted meanwhile."""
        parts, going = self._training.parts, [card for card in old.cards if self._removes(card)]
        kept = {card.adapter.version for card in old.cards if card not in going}
        for version in sorted(old.versions - kept):
            parts.adapters.discard(AdapterRef(name, version))
        await parts.checkpoints.remove(name, [card.name for card in going])
        if parts.log is not None:
            await parts.log.forget(_of(forgotten))
        await self._engine.reset_prefix_cache(files=True)
        await parts.journal.rewrite(lambda _: removal(name, forgotten, {}))
        await parts.journal.read(JournalFile.clean)

    # -- the journal -----------------------------------------------------------------------------

    async def _note(self, spec: ForgetSpec, found: Mapping[str, Forgotten], ignore_floor: bool) -> None:
        """Keeps what is still to be forgotten, for a start after a crash."""
        ids = {name: sorted(each.ids) for name, each in found.items()}
        text = json.dumps({"spec": asdict(spec), "found": ids, "ignore_floor": ignore_floor})
        statement = (_SET, [(text,)]) if found else (_CLEAR, [()])
        await self._training.parts.journal.rewrite(lambda _: [statement])

    async def _read(self, read: Callable[[JournalFile], T]) -> T:
        """Reads the journal by a connection of its own, so that commits need not wait for it."""

        def opened() -> T:
            with closing(JournalFile(self._journal, read_only=True)) as file:
                return read(file)

        with suppress(StorageError):
            await self._training.parts.journal.flush()
        return await asyncio.to_thread(opened)


async def _origin(steps: RebuildPlan, training: AdapterTraining) -> PolicySnapshot | None:
    """The policy that is built upon; None: a new one. Raises ConflictError: it is gone."""
    if steps.origin is not None:
        policy = (await training.checkpoints.load(steps.origin.name)).policy
        assert isinstance(policy, PolicySnapshot)
        return policy
    base = ref_of(steps.base)
    if base == BASE_ADAPTER:
        return None
    try:
        return await training.checkpoints.policy_of(base, training.checkpoints.newest_of(base))
    except (ParaLLMError, LookupError) as error:
        raise ConflictError(
            f"{training.name} was trained from {base}, which cannot be read any more: {error}"
        ) from error


def _of(forgotten: Forgotten) -> Wanted:
    """Whether a line of the trajectory log is a trajectory to be forgotten."""
    return lambda record: record.get("trajectory_id") in forgotten.ids


def serve(config: Config, served: Served, training: TrainingService) -> Forgetting | None:
    """What requests to forget ask; None: nothing is kept, so nothing can be forgotten."""
    if served.run is None:
        return None
    forgetting = Forgetting(training, served.engine, config.checkpointing, served.run.path / JOURNAL)
    training.hooks.started.append(forgetting.resume)
    return forgetting
