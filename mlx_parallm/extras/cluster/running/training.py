"""ClusterTraining: a training run as the trainer of a cluster.

begin ─▶ the version that the cluster serves, if this run does not have it
   each step: sample at the head ─▶ update ─▶ publish to all nodes
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from mlx_parallm.adapters.formats import FormatName
from mlx_parallm.app.build import Served
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import Event, GenerationRequest, RequestFailed, RequestFinished
from mlx_parallm.errors import NodeFailedError
from mlx_parallm.extras.cluster.archive import pack, unpack
from mlx_parallm.extras.cluster.cards import Member, NodeInfo, NodeRole, SharedVersion
from mlx_parallm.extras.cluster.http.remote import SAMPLE, RemoteEngines
from mlx_parallm.extras.cluster.trainer import Trainer
from mlx_parallm.rl.runs.records import Update
from mlx_parallm.rl.service import TrainingService

_FORMAT: FormatName = "peft"
_ADAPTER = "adapter"

_log = logging.getLogger(__name__)


class ClusterTraining:
    """Event loop's thread only.

    Args:
        node: this process in the cluster, which has the lease of the adapter.
        url: the address of the head.

    Attributes:
        engine: samples at the head, which spreads them over all nodes.
    """

    def __init__(self, node: Trainer, served: Served, service: TrainingService, url: str, token: str) -> None:
        self.node = node
        self.engine = ClusterEngine(self, url, token)
        self._served = served
        self._service = service
        self._published = 0  # number of the last version that is live in the cluster
        self._publishing = asyncio.Lock()

    async def begin(self) -> None:
        """Call this once training has started. If the cluster serves a version that this run has not made, training
        starts again from that one. New versions get numbers that the cluster has not used.

        Raises:
            ConflictError: the lease is lost.
            InvalidRequestError: that version has another rank, alpha or targets than those configured.
        """
        name, service = self.node.name, self._service
        registry = await self.node.registry()
        live = registry.live.get(name)
        newest = max((ref.version for ref in registry.staged if ref.name == name), default=0)
        if live is not None:
            self._published = live.version
            if not await self._has_made(live.ref):
                await self._adopt(live)
                await service.start_adapter(name)
                await service.pause()  # starting has resumed it
                await service.save(None, None, (), {})  # so that a restart has what this run begins with
        self._served.adapters.number_from(name, newest + 1)
        await self.publish_live()

    async def _has_made(self, ref: AdapterRef) -> bool:
        """Whether this run has made a version, also if a rollback has removed it since."""
        if self._service.loop(ref.name).training.versions.includes_ever(ref):
            return True
        changes = await self._service.parts.journal.read(lambda file: file.changes(ref.name)) or ()
        return any(isinstance(change.body, Update) and change.body.version == ref.version for change in changes)

    async def _adopt(self, version: SharedVersion) -> None:
        """Makes the cluster's version the live one here, under its number."""
        _log.info("training continues from %s, which the cluster serves", version.ref)
        archive = await self.node.archive(version)
        self._served.adapters.number_from(version.name, version.version)
        with tempfile.TemporaryDirectory() as folder:
            await asyncio.to_thread(unpack, archive, Path(folder) / _ADAPTER)
            await self._served.adapters.publish_folder(version.name, Path(folder) / _ADAPTER)

    async def publish_live(self) -> None:
        """Publishes the version that is live here, unless it is the base model. After a rollback, a new version goes
        live that equals it, here too: otherwise the nodes would keep the one that was given up, and what they sample
        would not be trained on.

        Raises:
            ConflictError: the lease is lost.
        """
        ref = self._served.adapters.live(self.node.name)
        if ref is not None and ref.version < self._published:
            ref = await self._service.loop(self.node.name).publish_again()
            _log.info("the nodes get %s, which equals the version that training was rolled back to", ref)
        if ref is not None:
            await self.publish(ref)

    async def publish(self, ref: AdapterRef) -> None:
        """Makes a version live in the cluster, unless it or a later one has been. Waits while the head does not answer.

        Raises:
            ConflictError: the lease is lost.
        """
        async with self._publishing:
            if ref.version <= self._published:
                return
            with tempfile.TemporaryDirectory() as folder:
                await self._served.adapters.write(ref, Path(folder) / _ADAPTER, _FORMAT)
                archive = await asyncio.to_thread(pack, Path(folder) / _ADAPTER)
            await self.node.publish(ref, archive)
            self._published = ref.version


class ClusterEngine:
    """Takes the samples of a training run at the head of the cluster, which spreads them over all nodes. Implements
    `rl.rollouts.answers.InferenceEngine`.

    Args:
        url: the address of the head.
    """

    def __init__(self, training: ClusterTraining, url: str, token: str) -> None:
        self._training = training
        self._head = Member(NodeInfo(NodeRole.HEAD.value, NodeRole.HEAD, url), seen_at=0.0)
        self._remote = RemoteEngines(token, SAMPLE)

    async def open(self, adapter: AdapterRef) -> None:
        """See `InferenceEngine.open`. The nodes have the base model of this run, and give what training needs."""
        await self._publish(adapter)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """See `InferenceEngine.generate`. The events come when the answer is complete, so one that breaks leaves
        nothing behind.

        Raises:
            NodeFailedError: the head does not answer, or was lost.
        """
        await self._publish(request.adapter)
        for event in await self._answer(replace(request, whole=True)):
            yield event

    async def close(self) -> None:
        """See `InferenceEngine.close`."""

    async def _publish(self, adapter: AdapterRef) -> None:
        if adapter != BASE_ADAPTER:
            await self._training.publish(adapter)

    async def _answer(self, request: GenerationRequest) -> list[Event]:
        events: list[Event] = []
        async with aclosing(self._remote.generate(self._head, request)) as answered:
            async for event in answered:
                if isinstance(event, RequestFailed) and isinstance(event.error, NodeFailedError):
                    raise event.error
                events.append(event)
        if not events or not isinstance(events[-1], RequestFinished | RequestFailed):
            raise NodeFailedError("the head has ended an answer too soon")
        return events
