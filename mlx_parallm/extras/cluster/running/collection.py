"""ClusterCollection: where a node of a cluster that does not train sends requests to be collected, and their rewards.

request ─▶ collect ─▶ message ─▶ stream of the cluster ─▶ the trainer of its adapter (`run.ClusterIntake`)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.readers import EVERYTHING, Reader
from mlx_parallm.core.requests import CollectionSpec, Event, GenerationRequest
from mlx_parallm.core.trajectories import FeedbackCard, GroupCard, Trajectory
from mlx_parallm.errors import ConflictError, StorageError, shown
from mlx_parallm.rl.recording import record
from mlx_parallm.rl.runs.records import (
    Arrival,
    EpisodeReward,
    Feedback,
    GroupEntry,
    TokenRewards,
    body_from_json,
    body_to_json,
)

if TYPE_CHECKING:
    from mlx_parallm.extras.cluster.node import Node


def to_message(body: Arrival | GroupEntry) -> bytes:
    """What a node sends to a trainer."""
    return json.dumps(body_to_json(body)).encode()


def from_message(message: bytes) -> Arrival | GroupEntry:
    """Raises ValueError: it is not what `to_message` made."""
    kind, text = json.loads(message)
    body: Arrival | GroupEntry = body_from_json(kind, text)
    return body


class ClusterCollection:
    """Implements `core.CollectingClient`. The trainer checks scoring functions and rewards when they
    arrive there, so what is wrong with them is in its log, and no error here.

    Args:
        default_adapter: what answers of the base model train.
    """

    def __init__(self, cluster: Node, default_adapter: str) -> None:
        self._cluster = cluster
        self._default = default_adapter

    async def check(
        self, collection: CollectionSpec, adapter: AdapterRef, reader: Reader, prompt: str | None = None
    ) -> CollectionSpec:
        """See `core.CollectingClient.check`."""
        name = self._trained_by(adapter)
        if name not in self._trained or not reader.sees(name):
            raise ConflictError(
                f"{shown(adapter.name)} is not trained in this cluster, so nothing can be collected for it; start "
                "mlx_parallm_train with --connect-to, or name an adapter that is.",
                param="collect_trajectory",
            )
        return collection

    def collect(self, request: GenerationRequest, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        """See `core.CollectingClient.collect`."""
        if request.stopping.max_tokens == 0:
            return events
        return record(request, events, self._send_group, lambda: None, nullcontext())

    async def reward_tokens(self, trajectory_id: str, rewards: Sequence[float], reader: Reader = EVERYTHING) -> None:
        """See `core.CollectingClient.reward_tokens`."""
        await self._send_reward(TokenRewards(trajectory_id, tuple(rewards), reader.bound))

    async def reward_episode(self, episode_id: str, group_id: str, score: float, reader: Reader = EVERYTHING) -> None:
        """See `core.CollectingClient.reward_episode`."""
        await self._send_reward(EpisodeReward(episode_id, group_id, score, reader.bound))

    async def close_group(self, group_id: str, reader: Reader = EVERYTHING) -> GroupCard:
        """Raises ConflictError: only the trainer knows the members of a group."""
        raise ConflictError(
            "This node does not train, so it cannot close a group; send group_size with its requests, and it closes "
            "when so many answers have come."
        )

    async def feedback(
        self, trajectory_id: str, score: float, user: str = "", reader: Reader = EVERYTHING
    ) -> FeedbackCard:
        """See `core.CollectingClient.feedback`. What others said of the answer is not known here."""
        await self._send_reward(Feedback(trajectory_id, score, user, reader.bound))
        return FeedbackCard(score, 1, late=False)

    # -- messages --------------------------------------------------------------------------------

    @property
    def _trained(self) -> frozenset[str]:
        return self._cluster.status().versions.trained

    def _trained_by(self, version: AdapterRef) -> str:
        return self._default if version == BASE_ADAPTER else version.name

    async def _send_group(self, trajectories: Sequence[Trajectory]) -> str:
        first = trajectories[0]
        assert first.adapter is not None  # an engine drew them
        message = await asyncio.to_thread(to_message, Arrival(tuple(trajectories)))
        sending = self._cluster.send(self._trained_by(first.adapter), message, first.trajectory_id)
        try:
            await asyncio.shield(sending)  # a client that leaves does not stop it
        except StorageError as error:
            return f"{error}: these trajectories will not be trained on."
        return ""

    async def _send_reward(self, entry: GroupEntry) -> None:
        """Sends a reward to each trainer, because only that which has the trajectory knows that it is its own.

        Raises:
            StorageError: it could not be sent to any.
        """
        if not self._trained:
            raise ConflictError("No adapter is trained in this cluster; start mlx_parallm_train with --connect-to.")
        message = to_message(entry)
        sending = asyncio.gather(
            *(self._cluster.send(name, message) for name in sorted(self._trained)), return_exceptions=True
        )
        ends = await asyncio.shield(sending)
        errors = [end for end in ends if isinstance(end, BaseException)]
        if len(errors) == len(ends):  # one whose trainer is gone may be full; that costs no other
            raise errors[0]
