"""Learner: the event loop's access to the policies in training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.config import ModelConfig, OptimizerConfig, ResolvedLoss
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.device import DeviceThread, completed, then
from mlx_parallm.errors import EngineDeadError
from mlx_parallm.train.accumulation import Contribution
from mlx_parallm.train.data import Datum, UpdateBatch, UpdateOutcome
from mlx_parallm.train.jobs import Parts
from mlx_parallm.train.losses import UpdateTotals
from mlx_parallm.train.policy import Policy, PolicySnapshot, PolicyState
from mlx_parallm.train.trainer import GRPOTrainer

T = TypeVar("T")

Publish = Callable[[UpdateOutcome, AdapterWeights], Future[AdapterRef] | None]
"""Publishes the weights of a finished update, or returns None if they are not to go live. On the device thread."""

_log = logging.getLogger(__name__)


async def ask_device(device: DeviceThread, ask: Callable[[], Future[T]], cancel: Callable[[Future[Any]], None]) -> T:
    """The result of what `ask` begins on the device thread, where its future is completed.

    Args:
        cancel: called on the device thread with that future if the caller is cancelled.

    Raises:
        Exception: what the future raises.
    """
    asked: list[Future[T]] = []

    def begin() -> Future[T]:
        asked.append(ask())
        return asked[0]

    def take_back() -> None:
        for future in asked:
            cancel(future)

    try:
        return await device.run(begin)
    except asyncio.CancelledError:
        with suppress(EngineDeadError):
            await device.run(take_back)
        raise


class Learner:
    """The event loop's access to the policies in training, by adapter name. A name that is not open raises KeyError.

    What is asked of one adapter is done in order; different adapters share micro-steps. `learn` makes a whole update.
    `accumulate` and `step` are its two halves: if their caller is cancelled, or one fails, it leaves nothing of itself
    in the gradients of the adapter, and no other adapter loses anything.
    """

    def __init__(self, device: DeviceThread, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self._device = device

    async def open(
        self, name: str, start: PolicySnapshot | None, lora: ModelConfig | None = None, seed: int | None = None
    ) -> None:
        """Starts training from this policy; None: from a new one, equal to the base model.

        Args:
            lora: its rank, alpha and target modules. None: those configured.
            seed: of the weights of a new policy. None: the configured one.

        Raises:
            ConfigError: the model has no linear layer with the name of a target module.
            InvalidRequestError: `start` has another rank, alpha or targets than `lora`.
        """
        trainer = self.trainer
        lora = lora or trainer.lora
        policy = await self._device.run(lambda: trainer.open(name, start, lora, seed))
        _log.info("training %s: %.1fM parameters, rank %d", name, policy.parameters / 1e6, lora.lora_rank)

    async def close(self, name: str) -> None:
        """Ends the training of a policy and frees its memory. What is under way for it fails. Does nothing if no policy
        of that name is open."""
        await self._device.run(lambda: self.trainer.close(name))

    async def learn(
        self, name: str, batch: UpdateBatch, publish: Publish | None = None
    ) -> tuple[UpdateOutcome, AdapterRef | None]:
        """Makes one update, in micro-steps between decode steps. `publish` is called right after it on the device
        thread, because a trip to the event loop and back would take a decode step. If the caller is cancelled, an
        update that is not finished is abandoned.

        Returns:
            The outcome, and the version that `publish` made of it, if any.

        Raises:
            StepFailedError: it failed on the device; the policy is as before.
            Exception: raised by `publish`; the policy has changed.
        """
        policy = self.trainer.policies[name]

        def publish_outcome(outcome: UpdateOutcome) -> Future[tuple[UpdateOutcome, AdapterRef | None]]:
            live = publish(outcome, policy.weights()) if publish else None
            return completed((outcome, None)) if live is None else then(live, lambda ref: (outcome, ref))

        return await ask_device(
            self._device,
            lambda: then(self.trainer.begin(policy, batch), publish_outcome),
            lambda _: self.trainer.abandon(policy),
        )

    async def accumulate(
        self,
        name: str,
        samples: Sequence[Datum],
        loss: ResolvedLoss,
        totals: UpdateTotals | None = None,
        returns_logprobs: bool = False,
    ) -> Contribution:
        """Adds the gradients of these samples to those since the last step. `totals`, `returns_logprobs`: see
        `GRPOTrainer.accumulate`.

        Raises:
            ValueError: the loss cannot be computed from these samples.
            StepFailedError: it failed on the device; the gradients are as before.
        """
        policy = self.trainer.policies[name]
        return await self._ask(lambda: self.trainer.accumulate(policy, samples, loss, totals, returns_logprobs))

    async def step(self, name: str, optimizer: OptimizerConfig) -> UpdateOutcome:
        """Makes an optimizer step from the gradients since the last step, which are then forgotten.

        Raises:
            ValueError: there are none.
            StepFailedError: the step, or gradients that it waits for, failed on the device; the policy is as before,
                and its gradients are forgotten.
        """
        policy = self.trainer.policies[name]
        return await self._ask(lambda: self.trainer.step(policy, optimizer))

    async def logprobs(self, name: str | None, samples: Sequence[Datum]) -> list[tuple[float, ...]]:
        """The logprobs, in nats, of each sample's trained tokens under an adapter as it is in training; None: under the
        base model. Raises StepFailedError: they could not be computed."""
        policy = None if name is None else self.trainer.policies[name]
        return await self._ask(lambda: self.trainer.logprobs(policy, samples))

    async def run(self, parts: Parts[T]) -> T:
        """Runs what belongs to no policy; see `GRPOTrainer.run`. Raises StepFailedError: it failed on the device."""
        return await self._ask(lambda: self.trainer.run(parts))

    async def _ask(self, ask: Callable[[], Future[T]]) -> T:
        """Asks the trainer for something, and takes it back if the caller is cancelled."""
        return await ask_device(self._device, ask, self.trainer.cancel)

    def state(self, name: str) -> PolicyState:
        """The current policy by reference. Nothing is copied; its memory is in use while the state is referenced."""
        return self.trainer.policies[name].state

    async def loaded(self, snapshot: PolicySnapshot) -> Policy:
        """A policy that is not in training, from a checkpoint. Its memory is in use while it is referenced.

        Raises:
            InvalidRequestError: see `Policy`.
        """
        trainer = self.trainer

        def load() -> Policy:
            policy = Policy(trainer.model.layout, trainer.lora, trainer.config.seed, snapshot)
            trainer.hold(policy)
            return policy

        return await self._device.run(load)

    async def snapshot(self, state: PolicyState | PolicySnapshot) -> PolicySnapshot:
        """A copy in host memory, made in parts; requests and updates continue between them."""
        if isinstance(state, PolicySnapshot):
            return state
        parts = state.copied()
        while (copy := await self._device.run(lambda: next(parts))) is None:
            pass
        return copy

    async def restore(self, name: str, goal: PolicyState | PolicySnapshot | None) -> None:
        """Goes back to a state or a checkpoint; None: to a new policy, equal to the base model. What was asked of the
        policy as it is now is cancelled, and its gradients since the last step are discarded.

        Raises:
            InvalidRequestError: the checkpoint has another rank, alpha or targets than those configured.
        """
        await self._device.run(lambda: self.trainer.restore(name, goal))

    def weights(self, name: str) -> AdapterWeights:
        """The current weights as MLX arrays, which only the device thread may read."""
        return self.trainer.policies[name].weights()
