"""UndoablePolicy: the learner's policy of one adapter, which a change that fails leaves as it was."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from mlx_parallm.train.learner import Learner
from mlx_parallm.train.policy import PolicySnapshot, PolicyState

_log = logging.getLogger(__name__)


class UndoablePolicy:
    """The policy of one adapter.

    Invariant: while the learner's policy may differ from the one that versions and reports describe, `_undo` is the
    policy that they describe. It is restored before the learner's policy is used for anything else.

    Args:
        discard: forgets a version that was staged for a change.
    """

    def __init__(self, name: str, learner: Learner, discard: Callable[[], None]) -> None:
        self._name = name
        self._learner = learner
        self._discard = discard
        self._undo: PolicyState | PolicySnapshot | None = None

    def accept(self) -> None:
        """Keeps the learner's policy as it is."""
        self._undo = None

    @asynccontextmanager
    async def undone_on_failure(self) -> AsyncIterator[None]:
        """At the end of the block, restores the policy and discards the version that was staged, unless the block has
        called `accept`. So a cancelled update never goes live, whatever the device is doing for it."""
        self._undo = await self.current()
        try:
            yield
        finally:
            if self._undo is not None:
                self._discard()
                try:
                    await self.current()
                except Exception:  # noqa: BLE001 - the block's own error is what the caller should see
                    _log.exception("the policy of %s could not be restored; it will be before its next use", self._name)

    async def current(self) -> PolicyState | PolicySnapshot:
        """The policy, after a pending undo has been done."""
        if self._undo is not None:
            await self._learner.restore(self._name, self._undo)
            self._undo = None
        return self._learner.state(self._name)
