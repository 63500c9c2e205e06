"""AtroposSource: takes batches from Atropos' trajectory API and gives their groups to training.

run-api ── GET /batch ─▶ ScoredData ─▶ GivenGroup ─▶ journal ─▶ TrajectoryBuffer ─▶ update

The API keeps nothing of a batch that it has sent, so a batch that was received is put into the journal before anything
else, and one whose request is under way when training ends is waited for.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from mlx_parallm.errors import InvalidRequestError, QueueFullError, StorageError
from mlx_parallm.extras.atropos.groups import GivenGroup
from mlx_parallm.extras.atropos.scored_data import ScoredData, TokenLimits, trajectories_of
from mlx_parallm.extras.atropos.trajectory_api import (
    ApiUnreachableError,
    NotRegisteredError,
    Registration,
    TrajectoryApi,
)

SOURCE = "atropos"
"""The sources of all groups begin with it."""

_EMPTY_PAUSE_S = 0.5
_DOWN_PAUSE_S = 1.0
_CLOSE_S = 10.0
"""Longest wait for a batch that is under way when training ends."""

_log = logging.getLogger(__name__)


class AtroposSource:
    """Registers this trainer, and takes batches while training wants groups. Event loop's thread only.

    Attributes:
        accepted, refused: groups so far.

    Args:
        give: see `AtroposGroups.give`.
        has_enough: whether the trajectories that wait make an update.
    """

    def __init__(
        self,
        api: TrajectoryApi,
        registration: Registration,
        limits: TokenLimits,
        give: Callable[[GivenGroup], Awaitable[None]],
        has_enough: Callable[[], bool],
    ) -> None:
        self.accepted = self.refused = 0
        self._api = api
        self._registration = registration
        self._give_to_training, self._has_enough = give, has_enough
        self._limits = limits
        self._registered = self._down = self._closing = False
        self._taking: asyncio.Task[int] | None = None

    async def run(self) -> None:
        """Takes batches until it is cancelled."""
        while True:
            taken = 0
            try:
                if not self._has_enough():
                    taken = await self.take()
            except Exception:  # noqa: BLE001 - whatever a batch contains, it costs that batch only
                _log.exception("a batch from Atropos could not be used")
            if not taken:
                await asyncio.sleep(_EMPTY_PAUSE_S)

    async def take(self) -> int:
        """Takes one batch if there is one, and returns how many of its groups wait for training now.

        A batch that has been asked for is given to training even if the caller is cancelled; see `close`.
        """
        self._taking = asyncio.create_task(self._take())
        return await asyncio.shield(self._taking)

    async def close(self) -> None:
        """Ends when the batch that was asked for is in the journal. Call it before training ends."""
        self._closing = True
        if self._taking is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await asyncio.gather(self._taking, return_exceptions=True)
        self._api.close()

    async def _take(self) -> int:
        try:
            if not self._registered:
                await self._register()
            batch = await self._api.batch()
        except NotRegisteredError as error:
            _log.warning("Atropos' API at %s: %s; registering again", self._api.url, error)
            self._registered = False
            return 0
        except ApiUnreachableError as error:
            await self._report_down(error)
            return 0
        if self._down:
            _log.info("Atropos' API at %s answers again", self._api.url)
            self._down = False
        return await self._give(batch or ())

    async def _register(self) -> None:
        info = await self._api.register(self._registration)
        self._registered = True
        wanted = self._registration
        if info.get("batch_size") != wanted.batch_size:
            _log.warning(
                "Atropos' API at %s makes batches of %s, which another trainer has registered, and an update takes %d "
                "trajectories; GET %s/reset_data, or restart it, before the environments start",
                self._api.url,
                info.get("batch_size"),
                wanted.batch_size,
                self._api.url,
            )

    async def _report_down(self, error: ApiUnreachableError) -> None:
        """Logs the first failure of several, and waits before another try."""
        if not self._down:
            _log.warning("%s; trying again until it answers (start it with run-api --port ...)", error)
        self._down = True
        if not self._closing:
            await asyncio.sleep(_DOWN_PAUSE_S)

    async def _give(self, batch: Sequence[Any]) -> int:
        groups = await asyncio.to_thread(self._read, batch)
        accepted = sum(await asyncio.gather(*map(self._give_group, groups)))
        self.accepted += accepted
        self.refused += len(batch) - accepted
        return accepted

    def _read(self, batch: Sequence[Any]) -> list[GivenGroup]:
        """The groups of a batch that can be trained on. The others are gone: the API has no way to send them back."""
        groups = []
        for item in batch:
            try:
                data = ScoredData.model_validate(item)
                trajectories = trajectories_of(data, self._limits)
            except (ValidationError, InvalidRequestError) as error:
                _log.warning("a group from Atropos is left out: %s", str(error).partition("\n")[0])
                continue
            name = SOURCE if data.env_id is None else f"{SOURCE}:{data.env_id}"
            groups.append(GivenGroup(f"{SOURCE}-{uuid.uuid4().hex}", name, trajectories, data.texts))
        return groups

    async def _give_group(self, group: GivenGroup) -> bool:
        """Returns whether it waits for training. While the disk or the buffer is full, it waits here."""
        failed = False
        while True:
            try:
                await self._give_to_training(group)
                return True
            except InvalidRequestError as error:
                _log.warning("a group from Atropos is left out: %s", error)
                return False
            except (StorageError, QueueFullError) as error:
                if self._closing:
                    _log.error("a group from Atropos is lost: %s", error)
                    return False
                if not failed:
                    _log.warning("a group from Atropos waits: %s", error)
                failed = True
                await asyncio.sleep(_DOWN_PAUSE_S)
