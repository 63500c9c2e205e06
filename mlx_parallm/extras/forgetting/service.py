"""Forgetting builds adapters anew without some of what they have learnt from, and removes what is kept of that.

    begin ─▶ intent on the disk ─▶ for each adapter: rebuild ─▶ one commit: the new policy, its updates without it
                                                      │          ─▶ live ─▶ remove: checkpoints, log, caches
                                                      └─ held: nothing changes
A process that ends on the way goes on at its next start: the intent is in the journal until all is removed. What has
failed is tried again by the next start, and when something else is to be forgotten. Requests are answered all the time;
the updates of the adapter wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.adapters.runs import JOURNAL
from mlx_parallm.app.build import Served
from mlx_parallm.atomic import reason_of
from mlx_parallm.config import CheckpointingConfig, Config
from mlx_parallm.core.adapters import BASE_ADAPTER, BEST, INCUMBENT, AdapterRef
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.errors import ConflictError, ParaLLMError, StorageError, UnknownTrajectoryError
from mlx_parallm.extras.forgetting.cards import AdapterPart, ForgetCard, ForgetPlan
from mlx_parallm.extras.forgetting.forgotten import ForgetSpec, Forgotten, edits, find, removal
from mlx_parallm.extras.forgetting.plan import Outdated, RebuildPlan, outdated, plan, tainted, unknown
from mlx_parallm.extras.forgetting.rebuild import Rebuild
from mlx_parallm.rl.runs.records import LearningSettings, Update
from mlx_parallm.rl.runs.store import JournalFile
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


@dataclass(frozen=True, slots=True)
class _Intent:
    """What is still to be forgotten on one request. `found`: by adapter; those that are done are taken out."""

    spec: ForgetSpec
    found: dict[str, Forgotten]
    ignore_floor: bool

    def to_json(self) -> dict[str, object]:
        ids = {name: sorted(each.ids) for name, each in self.found.items()}
        return {"spec": asdict(self.spec), "found": ids, "ignore_floor": self.ignore_floor}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> _Intent:
        spec = ForgetSpec(**{**stored["spec"], "trajectory_ids": tuple(stored["spec"]["trajectory_ids"])})
        found = {name: Forgotten(spec, frozenset(ids)) for name, ids in stored["found"].items()}
        return cls(spec, found, stored["ignore_floor"])


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
        self._is_busy = False

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
        """Begins to forget, when that is on the disk. Updates under way end first.

        Args:
            ignore_floor: adapters go live even if their evaluation is below `gate.eval_floor`.

        Raises:
            UnknownTrajectoryError: a trajectory is not in the journal.
            ConflictError: something else is being forgotten, an adapter cannot be built anew, it is not in training,
                or two of its versions are being compared.
            StorageError: it could not be written.
        """
        if self._is_busy:
            raise ConflictError("Something is being forgotten already; GET /v1/training/forget shows it.")
        self._is_busy = True
        try:
            for name in self._training.status().trained:
                await self._training.loop(name).settled()
            spec = replace(spec, asked_at=time.time())
            found = await self._find(spec)
            for name in found:
                self._training.loop(name)
                self._training.check_changeable(name)
            for part in [await self._part(name, each) for name, each in found.items()]:
                if part.problem:
                    raise ConflictError(part.problem)
            intents = [*await self._noted(), *([_Intent(spec, found, ignore_floor)] if found else [])]
            await self._note(intents)
        except BaseException:  # a cancelled caller too
            self._is_busy = False
            raise
        self._spawn(intents, str(spec))
        return self._card

    def _spawn(self, intents: Sequence[_Intent], what: str) -> None:
        self._is_busy, self._card = True, ForgetCard("rebuilding" if intents else "done", what)
        self._training.changes.spawn(self._forget(intents, what))

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
        unknown_updates = unknown(changes, forgotten.spec)
        part = AdapterPart(name, len(forgotten.ids), unknown=unknown_updates, log_lines=lines)
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
        tags = [tag for tag in card.tags if tag not in (BEST, INCUMBENT, "latest")]
        return self._rule == "all" or (self._rule == "untagged" and not tags)

    # -- the work --------------------------------------------------------------------------------

    async def resume(self) -> None:
        """Goes on with what the last process did not finish. Call this when training has started."""
        if intents := await self._noted():
            what = " and ".join(str(intent.spec) for intent in intents)
            _log.info("%s is forgotten, as the last process has begun", what)
            self._spawn(intents, what)

    async def _forget(self, intents: Sequence[_Intent], what: str) -> None:
        """Works through what is to be forgotten, adapter by adapter. One that fails does not stop the others."""
        held, failed = dict[str, str](), dict[str, str]()
        try:
            for intent, name in [(each, name) for each in intents for name in each.found]:
                try:
                    if refusal := await self._forget_of(name, intents, intent):
                        held[name] = refusal
                    del intent.found[name]
                    await self._note(intents)
                except Exception as error:  # noqa: BLE001 - whatever it is, the card says it, and it is tried again
                    _log.exception("%s of %s was not forgotten", intent.spec, name)
                    reason = reason_of(error) if isinstance(error, OSError) else str(error)  # without a path
                    failed[name] = reason or type(error).__name__
            with suppress(StorageError):  # only names and ids are left in the WAL, until the next commits
                await self._training.parts.journal.read(JournalFile.clean)
            state: Literal["failed", "held", "done"] = "failed" if failed else "held" if held else "done"
            reason = "; ".join(f"{name}: {each}" for name, each in (failed or held).items())
            self._card = replace(self._card, state=state, reason=reason)
        finally:
            self._is_busy = False

    async def _forget_of(self, name: str, intents: Sequence[_Intent], intent: _Intent) -> str:
        """Forgets what one adapter has learnt. Returns why its gate holds it; empty: it is done."""
        is_deleted = not any(await self._read(lambda file: file.count(name)))
        if is_deleted and not self._training.has_adapter(name):
            return ""
        if refusal := await self._training.loop(name).rebuild(partial(self._replace, name, intents, intent)):
            return refusal
        self._card = replace(self._card, state="removing", adapter=name)
        cards = self._training.parts.checkpoints.cards(name)
        changes = await self._read(lambda file: file.changes(name))
        await self._remove(name, intent.found[name], outdated(changes, cards))
        return ""

    async def _replace(
        self,
        name: str,
        intents: Sequence[_Intent],
        intent: _Intent,
        training: AdapterTraining,
        changes: PolicyJournal,
    ) -> str:
        """Replaces the policy, if it has learnt from what is forgotten, and removes that from the journal and from
        memory, so that no update takes it. No update is under way. Returns why the gate holds it."""
        journal = self._training.parts.journal
        await journal.rewrite(())  # a compaction that is under way ends first
        forgotten = await self._found_now(name, intent)
        await self._note(intents)
        # The worker ends before the file is closed, also when this is cancelled while it reads.
        with closing(JournalFile(self._journal, read_only=True)) as file, ThreadPoolExecutor(1, "forgetting") as worker:
            made = await asyncio.get_running_loop().run_in_executor(worker, file.changes, name)
            steps = plan(name, made, training.checkpoints.cards(), forgotten)
            if steps is not None:
                present = LearningSettings(training.config.seed, UpdateSettings.of(training.config))
                rebuild = Rebuild(steps, forgotten, file, worker, present)
                if refusal := await self._rebuild(rebuild, training, changes, intent.ignore_floor):
                    return refusal
                if steps.continues is not None:
                    self._drop_later(name, steps)
        forgotten = await self._found_now(name, intent)  # opinions have made copies meanwhile
        for statements in removal(forgotten):
            await journal.rewrite(statements)
        training.plateau.forget(forgotten.ids)
        if (key := intent.spec.key) is not None:
            self._training.ledger.forget_key(name, key)
        self._training.trajectories.buffer.remove(forgotten.ids, DropReason.FORGOTTEN)
        return ""

    def _drop_later(self, name: str, steps: RebuildPlan) -> None:
        """Drops what waits and was sampled by a version that had learnt from what is forgotten, or may have been."""
        buffer = self._training.trajectories.buffer
        turns = (turn for group in buffer.of(name) for member in group.members for turn in member.turns)
        later = [
            turn.trajectory_id
            for turn in turns
            if (version := turn.adapter) is None or (version.name == name and version.version in steps.tainted)
        ]
        buffer.remove(later, DropReason.FORGOTTEN)

    async def _found_now(self, name: str, intent: _Intent) -> Forgotten:
        """What of an adapter is to be forgotten, with what was made of it since that was found last."""
        found = (await self._read(partial(find, spec=intent.spec, known=intent.found))).get(name)
        if found is not None:
            intent.found[name] = found
        return intent.found[name]

    async def _rebuild(
        self, rebuild: Rebuild, training: AdapterTraining, changes: PolicyJournal, ignore_floor: bool
    ) -> str:
        """Returns why the gate holds the policy."""
        steps, name = rebuild.plan, training.name
        floor = None if ignore_floor else training.config.gate.eval_floor
        async with training.rebuilding(await _origin(steps, training)):
            updates = len(steps.changes)
            await rebuild.run(training, partial(self._progress, name, updates))
            self._progress(name, updates, updates)
            commit = partial(self._commit, rebuild, changes, name)
            refusal = await training.replace(rebuild.rewards, floor, steps.continues, commit)
        if refusal is not None:
            return refusal.reason
        made = {"updates": len(steps.learnt), "episodes": rebuild.episodes, "version": str(training.live)}
        self._training.emit("forgotten", adapter=name, **made)
        return ""

    async def _commit(self, rebuild: Rebuild, changes: PolicyJournal, name: str, card: CheckpointCard) -> None:
        first, continues, edited = rebuild.plan.affected[0], rebuild.plan.continues, edits(name, rebuild.edited)
        try:
            await changes.rebuilt(card, first, continues, edited)
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
        await parts.adapters.remove([AdapterRef(name, version) for version in sorted(old.versions - kept)])
        await self._training.loop(name).training.checkpoints.choose_no_more(old.cards)
        await parts.checkpoints.remove(name, [card.name for card in going])
        if parts.log is not None:
            await parts.log.forget(_of(forgotten))
        await self._engine.reset_prefix_cache(files=True)
        for statements in removal(forgotten):
            await parts.journal.rewrite(statements)
        await parts.journal.read(JournalFile.clean)

    # -- the journal -----------------------------------------------------------------------------

    async def _note(self, intents: Sequence[_Intent]) -> None:
        """Keeps what is still to be forgotten, for a start after a crash."""
        left = [intent.to_json() for intent in intents if intent.found]
        statement = (_SET, [(json.dumps(left),)]) if left else (_CLEAR, [()])
        await self._training.parts.journal.rewrite([statement])

    async def _noted(self) -> list[_Intent]:
        stored = await self._training.parts.journal.read(lambda file: file.rows(_READ))
        return [_Intent.from_json(each) for each in json.loads(stored[0][0])] if stored else []

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
