"""What the training loop asks of others. The loop is asyncio's; every coroutine here returns on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core import AdapterRef, CheckpointCard, Collection, Trajectory
from mlx_parallm.rl.samples import UpdateBatch, UpdateOutcome
from mlx_parallm.rl.snapshot import PolicySnapshot

Published = AdapterRef | Exception | None
"""The version that is live now; what went wrong; or None: it is not to go live."""


class Kept(Protocol):
    """A policy with its optimizer's state at one moment: by reference on the device, or a `PolicySnapshot`."""

    @property
    def step(self) -> int:
        """Optimizer steps made."""
        ...


Publish = Callable[[UpdateOutcome, AdapterWeights, Callable[[Published], None]], None]
"""Makes a version of what an update has learnt, and tells what came of it, or raises. Called on the device thread."""


class Learner(Protocol):
    """The policies being trained, by adapter name: float32 factors and an optimizer's state each, on the device.

    A name that is not open raises KeyError. Updates of one name follow each other; those of several go on together.
    """

    async def open(self, name: str, start: PolicySnapshot | None) -> None:
        """Begins with this state, or anew, equal to the base. Raises InvalidRequestError: `start` has other
        ranks, alpha or targets than those configured."""
        ...

    async def learn(
        self, name: str, batch: UpdateBatch, publish: Publish | None = None
    ) -> tuple[UpdateOutcome, AdapterRef | None]:
        """One optimizer step, in micro-steps beside requests; and the version that `publish` made of it, if any.

        Where its caller is cancelled, an update that is not finished is given up.

        Raises:
            StepFailedError: it failed on the device; the policy is as before.
            Exception: what went wrong with `publish`; the policy has learnt.
        """
        ...

    async def keep(self, name: str) -> Kept:
        """The policy as it is now, to go back to; nothing is copied. Whoever holds it holds its memory."""
        ...

    async def copy(self, kept: Kept) -> PolicySnapshot:
        """A copy in the host's memory; it takes a while, and requests and updates go on meanwhile."""
        ...

    async def restore(self, name: str, goal: Kept | None) -> None:
        """Goes back, to a checkpoint, or (None) to a new policy, equal to the base.

        Raises:
            InvalidRequestError: the checkpoint is of another kind of adapter.
        """
        ...


class Publisher(Protocol):
    """Versions of adapters, in the running server."""

    def live(self, name: str) -> AdapterRef | None:
        """What the name means now; None: nothing has that name."""
        ...

    def at_once(
        self, name: str, agreed: Callable[[UpdateOutcome], bool], told: Callable[[AdapterRef], None]
    ) -> Publish:
        """Stages and flips what is learnt, if it is `agreed` to, right where it was learnt: each trip to the event loop
        and back would take a decode step. `told`: the version's name, before anybody can ask for it. Both are asked on
        the device thread."""
        ...

    async def stage(self, name: str, told: Callable[[AdapterRef], None]) -> AdapterRef:
        """A new version of `name`, in a slot, of what the learner has of that name now.

        `told`: its name, before anybody can ask for it.
        """
        ...

    async def flip(self, ref: AdapterRef) -> None:
        """Makes the name mean this version, and sends requests that name no adapter to it if they go to the base."""
        ...

    def discard(self, ref: AdapterRef) -> None:
        """Forgets a version that was staged and is not to go live."""
        ...

    def keep(self, ref: AdapterRef) -> AbstractContextManager[None]:
        """While the block runs the version cannot be forgotten."""
        ...

    async def save(
        self,
        ref: AdapterRef,
        policy: PolicySnapshot,
        tags: Sequence[str],
        metrics: Mapping[str, float],
        step: int | None = None,
    ) -> CheckpointCard:
        """Writes version and optimizer state as checkpoint `step` (None: `policy.step`, or the next one that is free).

        Raises:
            ConflictError: `step` is taken.
            StorageError: the disk failed.
        """
        ...

    async def go_on_from(self, name: str, checkpoint: str) -> None:
        """A restart begins with this checkpoint, until there is a newer one."""
        ...

    def checkpoints(self, name: str) -> tuple[CheckpointCard, ...]:
        """Oldest first."""
        ...

    async def load(self, name: str, which: str) -> tuple[AdapterRef, PolicySnapshot]:
        """A checkpoint's version, known to the server but not live, and the trainer's state in it.

        Raises:
            UnknownModelError, AdapterFileError: there is none; it cannot be used.
        """
        ...


class Scorers(Protocol):
    """Who gives rewards."""

    async def check(self, collection: Collection) -> None:
        """May take a while the first time.

        Raises:
            OverloadedError: too many others are being checked.
            InvalidRequestError: unknown scorer (`scoring_function`), or `metadata` lacks what it reads.
        """
        ...

    async def score(self, group: Sequence[Trajectory]) -> tuple[float, ...]:
        """Rewards of trajectories that have one scorer, in order. Raises ScoringError: it failed, or hung."""
        ...


class ScoringError(Exception):
    """A scorer threw, hung, or gave something that is no finite number; costs its group only."""
