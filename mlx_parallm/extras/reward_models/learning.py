"""Trains a reward model on preferences, and says how often it agrees with those that were held out.

preferences ─▶ shuffled, pass after pass ─▶ batches of pairs ─▶ steps ─▶ agreement with the held-out ones
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mlx_parallm.config import LearningRateSchedule, ModelConfig, OptimizerConfig
from mlx_parallm.core.device import DeviceThread
from mlx_parallm.extras.reward_models.fitting import RewardModelInTraining
from mlx_parallm.extras.reward_models.model import RewardModel
from mlx_parallm.extras.reward_models.preferences import Agreement, Preference
from mlx_parallm.extras.reward_models.work import Row, StepLoss, scored, stepped
from mlx_parallm.train.jobs import Parts
from mlx_parallm.train.learner import ask_device
from mlx_parallm.train.trainer import GRPOTrainer

T = TypeVar("T")

_WARM_UP = 0.1
"""Share of the steps over which the learning rate rises from 0."""


@dataclass(frozen=True, slots=True)
class FitSettings:
    """How a reward model is trained.

    Attributes:
        epochs: passes over all preferences.
        batch_size: preferences of one step.
        learning_rate: the peak; it rises first, and falls to 0.
        seed: of the initial factors and of the order of the preferences.
    """

    epochs: int = 2
    batch_size: int = 16
    learning_rate: float = 5e-4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FitResult:
    """What came of a training. `trained`: preferences. `last`: the means of the last epoch. `held_out`: None if there
    were none."""

    steps: int
    trained: int
    last: StepLoss
    held_out: Agreement | None

    @property
    def metrics(self) -> dict[str, float]:
        """The figures, by name."""
        figures = {"steps": self.steps, "preferences": self.trained, "loss": self.last.loss}
        figures["agreement"] = self.last.agreement
        if self.held_out is not None:
            figures |= {"held_out": self.held_out.preferences, "held_out_agreement": self.held_out.share}
        return {name: float(value) for name, value in figures.items()}


OnStep = Callable[[int, int, StepLoss], None]
"""(number of the step, of all steps, its loss)."""


@dataclass(frozen=True, slots=True)
class RewardModelDevice:
    """The event loop's access to reward models. If a caller is cancelled, what it asked for is given up."""

    device: DeviceThread
    trainer: GRPOTrainer = field(repr=False)

    async def score(self, model: RewardModel, rows: Sequence[Row]) -> list[float]:
        """The rewards of rows. Raises StepFailedError: they could not be computed."""
        return await self._run(scored(self.trainer, model, rows))

    async def step(self, training: RewardModelInTraining, pairs: Sequence[Preference]) -> StepLoss:
        """One optimizer step. Raises StepFailedError, TrainingFailedError: it was not made."""
        return await self._run(stepped(self.trainer, training, pairs))

    async def open(self, lora: ModelConfig, seed: int, optimizer: OptimizerConfig) -> RewardModelInTraining:
        """A new reward model in training. Raises ConfigError: as `RewardModel.new`."""

        def make() -> RewardModelInTraining:
            model = RewardModel.new(self.trainer.model.layout, lora, seed)
            training = RewardModelInTraining(model, optimizer)
            self.trainer.hold(training)
            return training

        return await self.device.run(make)

    async def _run(self, job: Parts[T]) -> T:
        return await ask_device(self.device, lambda: self.trainer.run(job), self.trainer.cancel)


async def fit(
    device: RewardModelDevice,
    preferences: Sequence[Preference],
    held_out: Sequence[Preference],
    lora: ModelConfig,
    settings: FitSettings,
    on_step: OnStep | None = None,
) -> tuple[RewardModel, FitResult]:
    """Trains a new reward model on these preferences, of which there is at least one.

    Args:
        lora: rank, alpha and target modules of its adapter.
        held_out: those that the result says the agreement with; it may be empty.

    Raises:
        ConfigError: the model has no linear layer with the name of a target module.
        StepFailedError, TrainingFailedError: a step failed.
    """
    size = min(settings.batch_size, len(preferences))
    of_an_epoch = math.ceil(len(preferences) / size)
    steps = settings.epochs * of_an_epoch
    training = await device.open(lora, settings.seed, _optimizer(settings.learning_rate, steps))
    losses: list[StepLoss] = []
    for pairs in _shuffled(preferences, size, settings):
        losses.append(await device.step(training, pairs))
        if on_step is not None:
            on_step(len(losses), steps, losses[-1])
    last = losses[-of_an_epoch:]
    means = StepLoss(sum(each.loss for each in last) / len(last), sum(each.agreement for each in last) / len(last))
    agreement = await agreement_of(device, training.model, held_out) if held_out else None
    return training.model, FitResult(steps, len(preferences), means, agreement)


async def agreement_of(device: RewardModelDevice, model: RewardModel, preferences: Sequence[Preference]) -> Agreement:
    """How often a reward model agrees with these preferences, of which there is at least one."""
    rewards = await device.score(model, [row for each in preferences for row in (each.chosen, each.rejected)])
    return Agreement.of(rewards[0::2], rewards[1::2])


def _shuffled(preferences: Sequence[Preference], size: int, settings: FitSettings) -> Iterator[list[Preference]]:
    random_order = random.Random(settings.seed)
    for _ in range(settings.epochs):
        shuffled = random_order.sample(preferences, len(preferences))
        yield from (shuffled[start : start + size] for start in range(0, len(shuffled), size))


def _optimizer(peak: float, steps: int) -> OptimizerConfig:
    warm_up = round(_WARM_UP * steps)
    return OptimizerConfig(
        learning_rate=peak,
        schedule=LearningRateSchedule.LINEAR,
        warmup_updates=warm_up,
        decay_updates=max(1, steps - warm_up),
    )
