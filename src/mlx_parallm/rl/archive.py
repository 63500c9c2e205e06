"""Archive: what of an adapter outlives the moment: its best version, and its checkpoints on disk."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

from mlx_parallm.core import BASE_ADAPTER, AdapterRef, CheckpointCard
from mlx_parallm.errors import AdapterFileError, ConflictError, UnknownModelError
from mlx_parallm.rl.parts import Kept, Learner, Publisher
from mlx_parallm.rl.reports import Emit

BEST = "best"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version, the policy that it is of, and what its checkpoint says of it.

    `policy` None: a new policy, where `ref` is BASE_ADAPTER; any other version's is in its checkpoint.
    """

    ref: AdapterRef
    policy: Kept | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Archive:
    """`best` cannot be forgotten by the server while it is the best. `failures`: checkpoints that were not saved.

    The best version is held by reference until the next checkpoint, with which it is saved, before it (`latest` is
    the one that training resumes from); from then on it is on disk only.
    """

    def __init__(self, name: str, learner: Learner, publisher: Publisher, emit: Emit) -> None:
        self.best: KeptVersion | None = None
        self.failures = 0
        self._name = name
        self._learner = learner
        self._publisher = publisher
        self._emit = emit
        self._kept = ExitStack()

    # -- the best version ------------------------------------------------------------------------

    def set_best(self, best: KeptVersion | None) -> None:
        """Keeps this version, and lets go of the one before; one that was unloaded meanwhile cannot be the best."""
        kept = ExitStack()
        try:
            if best is not None:
                kept.enter_context(self.hold(best))
        except UnknownModelError as error:
            _log.warning("the best version of %s stays as it is: %s", self._name, error)
            return
        self._kept.close()
        self._kept, self.best = kept, best

    def hold(self, version: KeptVersion) -> AbstractContextManager[None]:
        """While the block runs the version cannot be forgotten."""
        return nullcontext() if version.ref == BASE_ADAPTER else self._publisher.keep(version.ref)

    async def find_best(self) -> KeptVersion | None:
        """The checkpoint tagged `best`; None: there is none that can be used."""
        try:
            return KeptVersion(*await self._publisher.load(self._name, BEST))
        except (UnknownModelError, AdapterFileError):
            return None

    async def find(self, which: str | None) -> KeptVersion:
        """`best` (None), or a checkpoint by name or tag; with its policy, unless it is the base.

        Raises:
            ConflictError: there is no best version.
            UnknownModelError, AdapterFileError: there is no such checkpoint; it cannot be used.
        """
        if which not in (None, BEST):
            return KeptVersion(*await self._publisher.load(self._name, str(which)))
        best = self.best
        if best is None or (best.policy is None and best.ref != BASE_ADAPTER):
            best = await self.find_best()
        if best is None:
            raise ConflictError(f"{self._name!r} has no best version yet: name a checkpoint.", param="to")
        return best

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoint_of(self, ref: AdapterRef | None) -> CheckpointCard | None:
        """The newest of that version."""
        cards = [card for card in self._publisher.checkpoints(self._name) if card.adapter == ref]
        return cards[-1] if cards else None

    async def save(
        self,
        ref: AdapterRef,
        policy: Kept,
        metrics: Mapping[str, float],
        tags: Sequence[str] = (),
        step: int | None = None,
    ) -> CheckpointCard:
        """Saves this version, and before it the best one where that is not saved yet.

        Raises:
            Exception: the publisher's; it is counted.
        """
        try:
            if self.best is not None and self.best.ref == ref:
                tags = [*tags, BEST]
            else:
                await self._save_best()
            card = await self._write(ref, policy, metrics, tags, step)
        except Exception as error:
            _log.error("a checkpoint of %s was not saved: %s", ref, error)
            self.failures += 1
            raise
        if BEST in tags:
            self._forget_policy()
        return card

    async def go_on_from(self, checkpoint: str) -> None:
        """A restart begins with this one."""
        try:
            await self._publisher.go_on_from(self._name, checkpoint)
        except Exception as error:  # noqa: BLE001 - the version is live, whatever a restart begins with
            _log.error("a restart would not begin with %s of %s: %s", checkpoint, self._name, error)
            self.failures += 1

    async def _save_best(self) -> None:
        best = self.best
        if best is None or best.policy is None:
            return
        await self._write(best.ref, best.policy, best.metrics, [BEST])
        self._forget_policy()

    def _forget_policy(self) -> None:
        """Of the best version, which is on disk now."""
        if self.best is not None:
            self.best = KeptVersion(self.best.ref)

    async def _write(
        self, ref: AdapterRef, policy: Kept, metrics: Mapping[str, float], tags: Sequence[str], step: int | None = None
    ) -> CheckpointCard:
        """See `rl.parts.Publisher.save`."""
        card = await self._publisher.save(ref, await self._learner.copy(policy), tags, metrics, step)
        self._emit("checkpoint", adapter=self._name, version=str(ref), checkpoint=card.name, tags=[*tags])
        return card
