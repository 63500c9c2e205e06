"""The versions and the checkpoints of adapters in training.

`PolicyCheckpoints` writes and reads them. `AdapterCheckpoints` knows when an adapter's next one is due, and which of
its versions was the best. `VersionHistory` says how old each version is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.adapters.checkpoints import CheckpointStore
from mlx_parallm.adapters.registry import AdapterRegistry
from mlx_parallm.adapters.service import AdapterService
from mlx_parallm.adapters.weights import VersionInfo
from mlx_parallm.config import CheckpointingConfig
from mlx_parallm.core.adapters import BASE_ADAPTER, BEST, INCUMBENT, AdapterRef
from mlx_parallm.errors import AdapterFileError, ConflictError, UnknownModelError
from mlx_parallm.rl.events import Emit
from mlx_parallm.train.learner import Learner
from mlx_parallm.train.policy import PolicySnapshot, PolicyState

PolicyOf = Callable[[AdapterRef], Awaitable[PolicySnapshot]]
"""Makes a policy from a live version that was not trained here: its weights, a new optimizer, step 0."""

_log = logging.getLogger(__name__)


class PolicyCheckpoints:
    """Saves policies with their optimizer states, and loads them.

    Args:
        store: the checkpoints of this run.
        registry: is told which versions have a checkpoint, and gets the versions that are loaded.
    """

    def __init__(self, store: CheckpointStore, registry: AdapterRegistry) -> None:
        self._store = store
        self._registry = registry

    async def save(
        self,
        ref: AdapterRef,
        policy: PolicySnapshot,
        tags: Sequence[str],
        metrics: Mapping[str, float],
        step: int | None = None,
    ) -> CheckpointCard:
        """Writes a version and its optimizer state as checkpoint `step`. If `step` is None, it is the policy's step or,
        if a rollback has left another checkpoint there, the next free step.

        Raises:
            ConflictError: there is a checkpoint of `step` with other content.
            StorageError: the disk failed.
        """
        write = self._store.save_checkpoint
        save = partial(write, ref, policy.weights, tags=tags, metrics=metrics, extra=policy.save)
        try:
            card = await asyncio.to_thread(save, step=policy.step if step is None else step)
        except ConflictError:
            if step is not None:
                raise
            card = await asyncio.to_thread(save)
        if version := self._registry.version(ref):
            self._registry.set_files(version, root=card.path, checkpoint=card.name)
        return card

    def cards(self, name: str) -> tuple[CheckpointCard, ...]:
        """The checkpoints of an adapter, oldest first."""
        return self._store.cards(name)

    def version(self, name: str, which: str) -> AdapterRef:
        """The version in a checkpoint, which the server knows from now on. Reads no file.

        Raises:
            UnknownModelError: there is no such checkpoint.
        """
        card = self._store.find(name, which)
        if card is None:
            raise UnknownModelError(f"{name!r} has no checkpoint {which!r}")
        return self._registry.restore(card.adapter, VersionInfo.of_checkpoint(card)).ref

    async def tag(self, name: str, checkpoint: str, tag: str) -> None:
        """Gives a checkpoint a tag, and takes it from the one that had it. A tagged one is not pruned."""
        await asyncio.to_thread(self._store.tag, name, checkpoint, tag)

    async def untag(self, name: str, tag: str) -> None:
        """Takes a tag from the checkpoint that has it. Raises StorageError."""
        await asyncio.to_thread(self._store.untag, name, tag)

    async def set_latest(self, name: str, checkpoint: str) -> None:
        """Makes a restart of the server resume from this checkpoint, until there is a newer one."""
        await asyncio.to_thread(self._store.set_latest, name, checkpoint)

    async def remove(self, name: str, checkpoints: Collection[str]) -> None:
        """Removes checkpoints of an adapter, whatever their tags are. Raises StorageError: some may remain."""
        await asyncio.to_thread(self._store.remove, name, checkpoints)

    async def load(self, name: str, which: str) -> tuple[AdapterRef, PolicySnapshot]:
        """Loads a checkpoint. Returns its version, which the server knows from now on, and its policy. The version does
        not go live.

        Raises:
            UnknownModelError: there is no such checkpoint.
            AdapterFileError: the checkpoint cannot be used.
        """
        loaded = await asyncio.to_thread(self._store.load_checkpoint, name, which)
        policy = await asyncio.to_thread(PolicySnapshot.load, Path(loaded.card.path), loaded.weights)
        return self._registry.restore(loaded.card.adapter, loaded.info).ref, policy


@dataclass(frozen=True, slots=True)
class TrainedVersion:
    """A version, its policy, and the metrics of its checkpoint.

    `policy` None: a new policy if `ref` is BASE_ADAPTER; otherwise the policy is in the version's checkpoint.
    """

    ref: AdapterRef
    policy: PolicyState | PolicySnapshot | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def selector(self) -> str:
        """The model name with which a request gets this version."""
        return self.ref.name if self.ref == BASE_ADAPTER else str(self.ref)


@dataclass(slots=True)
class UnsavedUpdates:
    """The updates that are in no checkpoint yet.

    `count`: updates since the last attempt to save. `since`: when the first of them was made or, if that attempt has
    failed, when it failed, in seconds of `time.monotonic`. `lost`: whether a crash now would lose an update.
    """

    config: CheckpointingConfig
    count: int = 0
    since: float | None = None
    lost: bool = False

    def add(self) -> None:
        self.count += 1
        self.since = time.monotonic() if self.since is None else self.since
        self.lost = True

    def postpone(self) -> None:
        """Call this after an attempt to save has failed. The next one is due after the usual number of updates or
        minutes."""
        self.count, self.since = 0, time.monotonic()

    def clear(self) -> None:
        self.count, self.since, self.lost = 0, None, False

    @property
    def due_in(self) -> float | None:
        """Seconds until a checkpoint is due; 0: it is due now; None: every update is in a checkpoint."""
        if not self.lost or self.since is None:
            return None
        due_at = self.since + 60 * self.config.minutes
        return 0.0 if self.count >= self.config.interval else max(0.0, due_at - time.monotonic())


class AdapterCheckpoints:
    """The checkpoints of one adapter in training, and its best version.

    `failures`: how often it failed to save a checkpoint, or to choose the checkpoint that a restart resumes from.

    The server does not forget the best version while it is the best. Its policy stays in memory until the next
    checkpoint is saved. The best version is saved before that one, because training resumes from the checkpoint that
    was saved last.
    """

    def __init__(
        self,
        name: str,
        learner: Learner,
        adapters: AdapterService,
        checkpoints: PolicyCheckpoints,
        config: CheckpointingConfig,
        emit: Emit,
        policy_of: PolicyOf | None,
    ) -> None:
        self.best: TrainedVersion | None = None
        self.unsaved = UnsavedUpdates(config)
        self.failures = 0
        self._name = name
        self._learner = learner
        self._adapters = adapters
        self._checkpoints = checkpoints
        self._emit = emit
        self._policy_of = policy_of
        self._lease = ExitStack()

    # -- the best version ------------------------------------------------------------------------

    def set_best(self, best: TrainedVersion | None) -> None:
        """Makes this version the best one; None: there is no best one. If the version was unloaded meanwhile, nothing
        changes."""
        lease = ExitStack()
        try:
            if best is not None:
                lease.enter_context(self._adapters.lease(best.selector))
        except UnknownModelError as error:
            _log.warning("the best version of %s stays as it is: %s", self._name, error)
            return
        self._lease.close()
        self._lease, self.best = lease, best

    async def choose_no_more(self, cards: Collection[CheckpointCard]) -> None:
        """Nothing goes back to one of these checkpoints by itself: they are not the best one, and none that a
        comparison begins from. Raises StorageError."""
        best = self.best
        if best is not None and best.ref in {card.adapter for card in cards}:
            self.set_best(None)
        for tag in (BEST, INCUMBENT):
            if any(tag in card.tags for card in cards):
                await self._checkpoints.untag(self._name, tag)

    async def load(self, which: str) -> TrainedVersion:
        """See `PolicyCheckpoints.load`."""
        return TrainedVersion(*await self._checkpoints.load(self._name, which))

    async def load_best(self) -> TrainedVersion | None:
        """Loads the checkpoint tagged `best`, and its metrics. Returns None if there is none that can be used."""
        card = next((card for card in reversed(self.cards()) if BEST in card.tags), None)
        try:
            return None if card is None else replace(await self.load(BEST), metrics=card.metrics)
        except (UnknownModelError, AdapterFileError):
            return None

    async def find(self, which: str | None) -> TrainedVersion:
        """The best version (None or `best`), or a checkpoint by name or tag.

        Raises:
            ConflictError: there is no best version.
            UnknownModelError: there is no such checkpoint.
            AdapterFileError: the checkpoint cannot be used.
        """
        if which not in (None, BEST):
            return await self.load(str(which))
        best = self.best
        if best is None or (best.policy is None and best.ref != BASE_ADAPTER):
            best = await self.load_best()
        if best is None:
            raise ConflictError(f"{self._name!r} has no best version yet: name a checkpoint.", param="to")
        return best

    # -- the live version ------------------------------------------------------------------------

    async def policy_of(self, live: AdapterRef, card: CheckpointCard | None) -> PolicySnapshot:
        """The policy that training of the live version starts from: the one in its checkpoint, or one that is made from
        its weights if it has no usable checkpoint.

        Raises:
            ConflictError: it has no usable checkpoint, and only adapters that were trained here can be trained further.
        """
        if card is not None:
            try:
                return (await self._checkpoints.load(self._name, card.name))[1]
            except AdapterFileError as error:
                _log.warning("%s starts from the weights of %s and a new optimizer: %s", self._name, live, error)
        if self._policy_of is None:
            raise ConflictError(f"{live} was not trained here, so it cannot be trained further; use another name.")
        return await self._policy_of(live)

    @property
    def next_step(self) -> int:
        """A step that no checkpoint has. A version that has the policy of an earlier one, which is saved at its step,
        gets a checkpoint of its own there."""
        return 1 + max((card.step for card in self.cards()), default=0)

    # -- saving ----------------------------------------------------------------------------------

    def cards(self) -> tuple[CheckpointCard, ...]:
        """The checkpoints of the adapter, oldest first."""
        return self._checkpoints.cards(self._name)

    def newest_of(self, ref: AdapterRef | None) -> CheckpointCard | None:
        """The newest checkpoint of a version."""
        cards = [card for card in self.cards() if card.adapter == ref]
        return cards[-1] if cards else None

    async def save(
        self,
        ref: AdapterRef,
        policy: PolicyState | PolicySnapshot,
        metrics: Mapping[str, float],
        tags: Sequence[str] = (),
        step: int | None = None,
    ) -> CheckpointCard:
        """Saves a version, and before it the best one if that is not saved yet.

        Raises:
            Exception: see `PolicyCheckpoints.save`. It is counted in `failures`.
        """
        try:
            if self.best is not None and self.best.ref == ref:
                tags = [*tags, BEST]
            elif self.best is not None and self.best.policy is not None:
                await self._write(self.best.ref, self.best.policy, self.best.metrics, [BEST])
                self._drop_best_policy()
            card = await self._write(ref, policy, metrics, tags, step)
        except Exception as error:
            _log.error("a checkpoint of %s was not saved: %s", ref, error)
            self.failures += 1
            raise
        if BEST in tags:
            self._drop_best_policy()
        self.unsaved.clear()
        return card

    async def set_latest(self, checkpoint: str) -> None:
        """Makes a restart of the server resume from this checkpoint. An error is only logged and counted."""
        try:
            await self._checkpoints.set_latest(self._name, checkpoint)
        except Exception as error:  # noqa: BLE001 - the version is live already, whatever a restart resumes from
            _log.error("a restart would not resume from %s of %s: %s", checkpoint, self._name, error)
            self.failures += 1

    def _drop_best_policy(self) -> None:
        """Frees the best version's policy, which is on disk now."""
        if self.best is not None:
            self.best = TrainedVersion(self.best.ref)

    async def _write(
        self,
        ref: AdapterRef,
        policy: PolicyState | PolicySnapshot,
        metrics: Mapping[str, float],
        tags: Sequence[str],
        step: int | None = None,
    ) -> CheckpointCard:
        card = await self._checkpoints.save(ref, await self._learner.snapshot(policy), tags, metrics, step)
        self._emit("checkpoint", adapter=self._name, version=str(ref), checkpoint=card.name, tags=[*tags])
        return card


# ---- versions ------------------------------------------------------------------------------------

_KEPT = 1000
"""The least number of versions that are remembered, the newest ones."""


class VersionHistory:
    """The published versions of one adapter, in order; training continues from the last one. The newest of them are
    remembered: all whose trajectories may be trained on, and at least 1,000.

    `staleness`, `includes_ever` and `announce` may be called on any thread.

    Args:
        max_staleness: the largest staleness that is asked for.
    """

    def __init__(self, start: AdapterRef, max_staleness: int = 0) -> None:
        self._kept = max(_KEPT, max_staleness + 1)
        self._order = ({start: 0}, 0)  # positions, which other threads look up while they grow; and the last one
        self._ever = {start: None}  # a set in order
        self._announced: AdapterRef | None = None
        self._saved: AdapterRef | None = None

    @property
    def latest(self) -> AdapterRef:
        return next(reversed(self._positions))

    @property
    def _positions(self) -> dict[AdapterRef, int]:
        return self._order[0]

    def staleness(self, ref: AdapterRef) -> int | None:
        """How many versions were published after `ref`; None: `ref` is not in the history, or not any more."""
        if ref in (self._announced, self._saved):
            return 0
        positions, last = self._order
        position = positions.get(ref)
        return None if position is None else max(0, last - position)

    def includes_ever(self, ref: AdapterRef) -> bool:
        """Whether `ref` was in the history at any time. A request may use a version that a rollback has removed."""
        return ref in self._ever

    def announce(self, ref: AdapterRef) -> None:
        """Call this before `ref` goes live: requests can use it before `append` is called."""
        self._note(ref)
        self._announced = ref

    def retract(self) -> AdapterRef | None:
        """Forgets the announced version, if there is one that was not appended, and returns it."""
        ref, self._announced = self._announced, None
        return ref

    def add_saved(self, ref: AdapterRef) -> None:
        """Call this when a checkpoint has saved the current policy as a new version, which requests may name. That
        version is in the history until the next one is appended."""
        self._note(ref)
        self._saved = ref

    def append(self, ref: AdapterRef) -> None:
        self._note(ref)
        positions, last = self._order
        positions[ref] = last + 1
        self._order = (positions, last + 1)
        self._announced = self._saved = None
        if len(positions) > self._kept:
            del positions[next(iter(positions))]

    def _note(self, ref: AdapterRef) -> None:
        self._ever[ref] = None
        if len(self._ever) > self._kept:
            del self._ever[next(iter(self._ever))]

    def continue_from(self, earlier: Sequence[AdapterRef]) -> None:
        """Call this after a restart: these versions, oldest first, came before the only one in the history."""
        order = [*(ref for ref in earlier if ref != self.latest), self.latest]
        for ref in order:
            self._note(ref)
        self._order = ({ref: position for position, ref in enumerate(order)}, len(order) - 1)

    def rewind_to(self, ref: AdapterRef) -> None:
        """Removes the versions after `ref`. If `ref` is not in the history, a new history starts with it."""
        position = self._positions.get(ref, 0)
        older = {version: at for version, at in self._positions.items() if at < position}
        self._note(ref)
        self._order = ({**older, ref: position}, position)
        self._announced = self._saved = None

    def last(self, count: int) -> tuple[str, ...]:
        """The last `count` versions as text, oldest first."""
        return tuple(map(str, list(self._positions)[-count:]))
