"""The asyncio face of the trainer: policies by adapter name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core import DeviceThread
from mlx_parallm.rl.policy import Policy
from mlx_parallm.rl.samples import UpdateBatch, UpdateOutcome
from mlx_parallm.rl.snapshot import PolicySnapshot
from mlx_parallm.rl.trainer import GRPOTrainer

T = TypeVar("T")

_log = logging.getLogger(__name__)


class DeviceLearner:
    """Implements `rl.parts.Learner`. Event loop's thread only; arrays stay on the device thread."""

    def __init__(self, device: DeviceThread, trainer: GRPOTrainer) -> None:
        self._device = device
        self._trainer = trainer
        self._policies: dict[str, Policy] = {}
        self._learnt: dict[str, AdapterWeights] = {}

    async def open(self, name: str, start: PolicySnapshot | None) -> None:
        """See `rl.parts.Learner.open`. Raises ConfigError: the model has no linear of a target's name."""
        trainer, lora = self._trainer, self._trainer.settings.lora
        self._learnt.pop(name, None)
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

    async def learn(self, name: str, batch: UpdateBatch) -> UpdateOutcome:
        policy = self._policies[name]
        self._learnt.pop(name, None)

        def start(tell: Callable[[tuple[UpdateOutcome | Exception, AdapterWeights]], None]) -> None:
            self._trainer.begin(policy, batch, lambda outcome: tell((outcome, policy.weights())))

        outcome, weights = await self._device.on_device(start)
        if isinstance(outcome, Exception):
            raise outcome
        self._learnt[name] = weights
        return outcome

    async def snapshot(self, name: str) -> PolicySnapshot:
        return await self._ask(self._policies[name].snapshot)

    async def restore(self, name: str, snapshot: PolicySnapshot) -> None:
        policy = self._policies[name]
        self._learnt.pop(name, None)
        await self._ask(lambda: policy.restore(snapshot))

    async def weights(self, name: str) -> AdapterWeights:
        """As they are now, MLX's: to be handed back to the device thread. Those of an update came with its outcome."""
        learnt = self._learnt.get(name)
        return await self._ask(self._policies[name].weights) if learnt is None else learnt

    async def _ask(self, call: Callable[[], T]) -> T:
        """What `call` returns on the device thread; what it raises is raised here, and costs the thread nothing."""

        def start(tell: Callable[[T | Exception], None]) -> None:
            try:
                tell(call())
            except Exception as error:  # noqa: BLE001 - it is the caller's: raised where it waits
                tell(error)

        answer = await self._device.on_device(start)
        if isinstance(answer, Exception):
            raise answer
        return answer
