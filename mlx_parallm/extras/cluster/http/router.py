"""RoutedEngine: the engine of the head, which is its own engine and those of the replicas.

The adapter version of a request is known before it comes here, so it does not matter in which order the nodes make a
new version live. A request goes to a node that holds its version and has the least to do. Among nodes that have about
as little to do, the beginning of the prompt decides, so that prompts with the same beginning meet in one prefix cache
(rendezvous hashing: Thaler and Ravishankar, 1998).

A request that fails begins anew on another node, as long as nobody has read any of its answer. A node that cannot be
reached gets no requests for a while, so that they do not all wait for it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from mlx_parallm.core.requests import Event, GenerationRequest, RequestFailed, RequestFinished, RequestStarted
from mlx_parallm.errors import EngineError, NodeFailedError
from mlx_parallm.extras.cluster.cards import Member, NodeRole
from mlx_parallm.extras.cluster.http.counted import CountedEngine, TokenLoad, tokens_of
from mlx_parallm.extras.cluster.http.remote import NodeUnreachableError, RemoteEngines
from mlx_parallm.extras.cluster.http.wire import may_travel

if TYPE_CHECKING:
    from mlx_parallm.extras.cluster.node import Node

_HEAD_TOKENS = 256
"""How many tokens of a prompt decide where it goes: longer common beginnings are worth more, and shorter prompts are
spread by all of theirs."""
_LEFT_OUT_S = 5.0
"""How long a node that could not be reached gets no requests."""

_log = logging.getLogger(__name__)


@dataclass
class RoutingCounts:
    """What the router has done. `requests`: by node. `retried`: begun anew on another node. `broken`: streams that were
    ended by an error because their node was lost."""

    requests: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    broken: int = 0


class RoutedEngine(CountedEngine):
    """Implements `core.EngineClient`. All but `generate` is about this node's own engine.

    Args:
        engine: the head's own engine, which holds every version that it has leased.
    """

    def __init__(self, engine: CountedEngine, cluster: Node, remote: RemoteEngines, first_base: str) -> None:
        super().__init__(engine)
        self.load = engine.load
        self._cluster = cluster
        self._remote = remote
        self._first_base = first_base
        self._sent: dict[str, TokenLoad] = {}
        self.counts = RoutingCounts()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """See `core.EngineClient.generate`."""
        started = False
        async with aclosing(self._answered(request)) as events:
            async for event in events:
                if isinstance(event, RequestStarted):
                    if started:  # on a node that has failed since
                        continue
                    started = True
                yield event

    async def _answered(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The events of a request at the first node that does not fail. Those that failed before it have sent
        RequestStarted at most."""
        failed: set[str] = set()
        while (member := self._choose(request, failed)) is not None:
            node, answered = member.info.id, False
            self.counts.requests[node] += 1
            try:
                async with aclosing(self._at(member, request)) as events:
                    async for event in events:
                        answered |= not isinstance(event, RequestStarted)
                        yield event
                return
            except NodeFailedError as error:
                _log.warning("%s", error)
                failed.add(node)
                if isinstance(error, NodeUnreachableError):
                    member.left_out_until = time.monotonic() + _LEFT_OUT_S
                if answered:
                    self.counts.broken += 1
                    yield RequestFailed(error)
                    return
                self.counts.retried += 1
        self.counts.requests[NodeRole.HEAD.value] += 1
        async with aclosing(cast(AsyncGenerator[Event, None], self._engine.generate(request))) as events:
            async for event in events:
                yield event

    async def _at(self, member: Member, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The events of a request at another node. If nobody reads them before the last one, they come together with
        it."""
        load, kept, begun = self._sent.setdefault(member.info.id, TokenLoad()), list[Event](), False
        with load.of(tokens_of(request)):
            async with aclosing(self._remote.generate(member, request)) as events:
                async for event in events:
                    if not begun:
                        _check_usable(event)
                    begun |= not request.whole and not isinstance(event, RequestStarted)
                    kept.append(event)
                    ends = isinstance(event, RequestFinished | RequestFailed)
                    if ends or not request.whole:
                        for each in kept:
                            yield each
                        kept.clear()
                    if ends:
                        return
        raise NodeFailedError(f"node {member.info.id} has ended an answer too soon")

    def _choose(self, request: GenerationRequest, failed: set[str]) -> Member | None:
        """The node that answers a request; None for this one."""
        if not may_travel(request) or request.base not in ("", self._first_base):
            return None
        holders, now = self._cluster.others_with(request.adapter), time.monotonic()
        usable = [each for each in holders if each.info.id not in failed and each.left_out_until <= now]
        loads: dict[Member | None, int] = {None: self.load.tokens}
        loads |= {member: self._load_of(member) for member in usable}
        limit = min(loads.values()) + tokens_of(request)
        beginning = repr((str(request.adapter), request.prompts[0][:_HEAD_TOKENS])).encode()
        near = [member for member, load in loads.items() if load < limit]
        return max(near, key=lambda member: _rank(member.info.id if member else "", beginning))

    def _load_of(self, member: Member) -> int:
        """What was sent there, or what the node itself says, if it has other clients too."""
        sent = self._sent.setdefault(member.info.id, TokenLoad())
        return max(sent.tokens, member.info.outstanding_tokens)


def _check_usable(event: Event) -> None:
    """Raises NodeFailedError if the request has failed for a reason that another node may not have."""
    if isinstance(event, RequestFailed) and isinstance(event.error, EngineError):
        raise NodeFailedError(str(event.error))


def _rank(node: str, beginning: bytes) -> bytes:
    return hashlib.blake2b(beginning, key=hashlib.sha256(node.encode()).digest(), digest_size=8).digest()
