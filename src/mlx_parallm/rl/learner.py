"""The asyncio face of the trainer: policies by adapter name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core import AdapterRef, DeviceThread
from mlx_parallm.errors import EngineDeadError
from mlx_parallm.rl.kept import KeptPolicy
from mlx_parallm.rl.parts import Kept, Publish, Published
from mlx_parallm.rl.policy import Policy
from mlx_parallm.rl.samples import UpdateBatch, UpdateOutcome
from mlx_parallm.rl.snapshot import PolicySnapshot
from mlx_parallm.rl.trainer import GRPOTrainer

T = TypeVar("T")

_COPY_BYTES = 8 << 20
"""Copied to the host in one turn of the device thread: a few milliseconds."""

_log = logging.getLogger(__name__)


class DeviceLearner:
    """Implements `rl.parts.Learner`. Event loop's thread only; arrays stay on the device thread."""

    def __init__(self, device: DeviceThread, trainer: GRPOTrainer) -> None:
        self._device = device
        self._trainer = trainer
        self._policies: dict[str, Policy] = {}

    async def open(self, name: str, start: PolicySnapshot | None) -> None:
        """See `rl.parts.Learner.open`. Raises ConfigError: the model has no linear of a target's name."""
        trainer, lora = self._trainer, self._trainer.settings.lora
        policy = self._policies[name] = await self._ask(lambda: trainer.open(name, start))
        _log.info(
            "training %s: %d tensors, %d numbers, rank %d, alpha %g, on %s; nothing else has a gradient",
            name,
            policy.tensors,
            policy.parameters,
            lora.rank,
            lora.alpha,
            ", ".join(lora.targets),
        )

    async def learn(
        self, name: str, batch: UpdateBatch, publish: Publish | None = None
    ) -> tuple[UpdateOutcome, AdapterRef | None]:
        """See `rl.parts.Learner.learn`."""
        policy = self._policies[name]

        def start(tell: Callable[[tuple[UpdateOutcome | Exception, Published]], None]) -> None:
            def learnt(outcome: UpdateOutcome | Exception) -> None:
                if publish is None or isinstance(outcome, Exception):
                    tell((outcome, None))
                    return
                try:
                    publish(outcome, policy.weights(), lambda published: tell((outcome, published)))
                except Exception as error:  # noqa: BLE001 - it costs the update: raised where that is waited for
                    tell((outcome, error))

            self._trainer.begin(policy, batch, learnt)

        try:
            outcome, published = await self._device.on_device(start)
        except asyncio.CancelledError:
            with suppress(EngineDeadError):
                await self._ask(lambda: self._trainer.abandon(policy))
            raise
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(published, Exception):
            raise published
        return outcome, published

    async def keep(self, name: str) -> KeptPolicy:
        """See `rl.parts.Learner.keep`."""
        policy = self._policies[name]
        return await self._ask(policy.keep)

    async def copy(self, kept: Kept) -> PolicySnapshot:
        """See `rl.parts.Learner.copy`. Other units of device work run between its turns."""
        if isinstance(kept, PolicySnapshot):
            return kept
        assert isinstance(kept, KeptPolicy)
        turns = kept.copied(_COPY_BYTES)
        while (copy := await self._ask(lambda: next(turns))) is None:
            pass
        return copy

    async def restore(self, name: str, goal: Kept | None) -> None:
        """See `rl.parts.Learner.restore`."""
        assert goal is None or isinstance(goal, KeptPolicy | PolicySnapshot)
        policy = self._policies[name]
        await self._ask(lambda: policy.restore(goal))

    async def weights(self, name: str) -> AdapterWeights:
        """As they are now, MLX's: to be handed back to the device thread."""
        return await self._ask(self._policies[name].weights)

    async def _ask(self, call: Callable[[], T]) -> T:
        """What `call` returns on the device thread. Raises what it raises."""
        return await self._device.on_device(lambda tell: tell(call()))
