"""GroupQueue: gives the groups that environments send to training, each once.

An environment that gets no answer sends the same group again, up to three times. Two groups with the same content may
also be two samples, so a group counts as sent again only if it is in doubt whether the first answer has arrived: its
client had left, some other group of the same request failed, or the server was restarted meanwhile.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.extras.atropos.groups import AtroposGroups, GivenGroup
from mlx_parallm.extras.atropos.scored_data import ScoredData, TokenLimits, trajectories_of
from mlx_parallm.extras.atropos.source import SOURCE

DOUBT_S = 120.0
"""How long after an answer was lost, or after the start of the server, a group may be sent again. Atropos' client makes
three attempts within seconds of each other."""

_MAX_IN_DOUBT = 1024
_OF_EARLIER_PROCESS = 64
"""Groups whose answers may have been lost when the server was restarted: the last ones."""


@dataclass(frozen=True, slots=True)
class SentGroup:
    """A group as it came, its digest, and what is trained of it."""

    data: ScoredData
    digest: str
    trajectories: tuple[GivenTrajectory, ...]

    @classmethod
    def of(cls, data: ScoredData, limits: TokenLimits) -> SentGroup:
        """Raises InvalidRequestError: it cannot be trained on."""
        return cls(data, data.digest(), trajectories_of(data, limits))

    def given(self, source: str) -> GivenGroup:
        group_id = f"{SOURCE}-{self.digest}-{uuid.uuid4().hex[:8]}"
        return GivenGroup(group_id, source, self.trajectories, self.data.texts)


class GroupQueue:
    """Event loop's thread only.

    Attributes:
        latest: the group that came last; None before the first one.
    """

    def __init__(self, groups: AtroposGroups) -> None:
        self.latest: ScoredData | None = None
        self._groups = groups
        self._in_doubt: dict[str, float] = {}  # digest → until when; oldest first
        self._opening: asyncio.Task[None] | None = None

    async def accept(
        self,
        groups: Sequence[SentGroup],
        source_of: Callable[[ScoredData], str],
        client_left: Callable[[], Awaitable[bool]],
    ) -> None:
        """Returns when all groups are in the journal.

        Raises:
            QueueFullError, StorageError: some are not; the client sends all of them again.
            InvalidRequestError: the loss cannot learn from one of them.
        """
        await self._open()
        new = [group for group in groups if not self._is_sent_again(group.digest)]
        giving = (self._groups.give(group.given(source_of(group.data))) for group in new)
        results = await asyncio.gather(*giving, return_exceptions=True)
        accepted = [group for group, result in zip(new, results, strict=True) if result is None]
        if accepted:
            self.latest = accepted[-1].data
        failures = [result for result in results if result is not None]
        if failures or await client_left():
            self._doubt(group.digest for group in groups if group not in new or group in accepted)
        if failures:
            raise failures[0]

    async def _open(self) -> None:
        """The first time, doubts the last groups of an earlier process."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._doubt_earlier())
        await asyncio.shield(self._opening)

    async def _doubt_earlier(self) -> None:
        ids = await self._groups.last(_OF_EARLIER_PROCESS)
        parts = (group_id.split("-") for group_id in ids)
        self._doubt(part[1] for part in parts if len(part) == 3 and part[0] == SOURCE)

    def _doubt(self, digests: Iterable[str]) -> None:
        until = time.monotonic() + DOUBT_S
        for digest in digests:
            self._in_doubt.pop(digest, None)
            self._in_doubt[digest] = until
        while len(self._in_doubt) > _MAX_IN_DOUBT:
            del self._in_doubt[next(iter(self._in_doubt))]

    def _is_sent_again(self, digest: str) -> bool:
        """Whether the group is here already. Another one with the same content is new."""
        until = self._in_doubt.pop(digest, 0.0)
        return until > time.monotonic()
