"""RewardModelTrainer trains reward models on the preferences that the run of a server has collected."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mlx_parallm.app.build import Served
from mlx_parallm.config import Config, ModelConfig
from mlx_parallm.core.requests import Signal
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import ConfigError, ConflictError, InvalidRequestError
from mlx_parallm.extras.reward_models.cards import RewardModelCard, RewardModelSpec
from mlx_parallm.extras.reward_models.folder import no_reward_model
from mlx_parallm.extras.reward_models.learning import FitResult, FitSettings, fit
from mlx_parallm.extras.reward_models.preferences import Preference, split
from mlx_parallm.extras.reward_models.service import RewardModels
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.scoring.scorers import REWARD_MODEL
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.trajectories import DropReason

MOST_PREFERENCES = 4096
"""The newest of the run are taken."""


class RewardModelTrainer:
    """Trains reward models, one at a time. Their steps share the device time of training with the updates of adapters.
    Used on the event loop's thread only.

    Args:
        models: the reward models that are there, by which rows are scored.
        lora: rank, alpha and target modules of the adapters of reward models.
    """

    def __init__(self, models: RewardModels, journal: Journal, lora: ModelConfig) -> None:
        self._models, self._device, self._folder = models, models.device, models.folder
        self._journal, self._lora = journal, lora
        self._one_at_a_time = asyncio.Lock()

    async def train(self, spec: RewardModelSpec) -> RewardModelCard:
        """Trains a reward model on the preferences of this run, and returns when its folder is on the disk.

        Raises:
            InvalidRequestError: the name is not plain, there is no folder for reward models, or there are too few
                prompts to hold out that share.
            ConflictError: the name is taken, no preference was collected, or another one is in training.
            StepFailedError, TrainingFailedError: a step failed; nothing is written.
            StorageError: it could not be written.
        """
        if self._one_at_a_time.locked():
            raise ConflictError("Another reward model is in training; wait until it has ended.")
        async with self._one_at_a_time:
            await asyncio.to_thread(self._folder.check_new, spec.name)
            preferences = await self._collected()
            try:
                used, held_out = split(preferences, spec.held_out, spec.seed)
            except ValueError as error:
                raise InvalidRequestError(f"held_out: {error}", "held_out") from error
            settings = FitSettings(spec.epochs, spec.batch_size, spec.learning_rate, spec.seed)
            model, result = await fit(self._device, used, held_out, self._lora, settings)
            weights = await self._device.device.run(model.weights)
            layout = self._device.trainer.model.layout
            await asyncio.to_thread(self._folder.save, spec.name, weights, layout, result.metrics)
            return _card(spec.name, result)

    async def score(self, name: str, rows: Sequence[tuple[int, ...]]) -> Sequence[float]:
        """The rewards that the reward model of this name gives rows of tokens, each a prompt with its answer.

        A row that has no end-of-sequence token at its end gets one. If the caller is cancelled, the rest is given up.

        Raises:
            InvalidRequestError: there is none of this name, or it cannot be used.
            StepFailedError: it could not be computed.
        """
        await asyncio.to_thread(self._models.check, name)
        return await self._models.score(name, rows)

    def unknown(self, name: str) -> InvalidRequestError:
        """The error about a name that no reward model has."""
        return no_reward_model(name)

    async def _collected(self) -> list[Preference]:
        """The preferences of the run, whatever became of them, but for those that a later one of the same user has
        replaced."""
        prefix = f"{Signal.PREFERENCES.value}-"
        try:
            groups = await self._journal.groups(prefix, DropReason.REPLACED.value, MOST_PREFERENCES)
        except ConfigError as error:
            raise ConflictError(f"The journal of the run cannot be read: {error}") from error
        found = [preference for group in groups if (preference := _preference(group)) is not None]
        if not found:
            raise ConflictError("This run has no preferences; send some with POST /v1/training/preference.")
        return found


def _preference(group: Sequence[Trajectory]) -> Preference | None:
    """None: the group is none of a preference."""
    if len(group) != 2 or any(each.collection.signal is not Signal.PREFERENCES for each in group):
        return None
    chosen, rejected = group
    return Preference(chosen.prompt_ids, chosen.completion_ids, rejected.completion_ids)


def _card(name: str, result: FitResult) -> RewardModelCard:
    agreement = result.held_out
    low, high = (None, None) if agreement is None else agreement.interval
    return RewardModelCard(
        name=name,
        scoring_function=f"{REWARD_MODEL}{name}",
        preferences=result.trained,
        steps=result.steps,
        loss=result.last.loss,
        agreement=result.last.agreement,
        held_out=0 if agreement is None else agreement.preferences,
        held_out_agreement=None if agreement is None else agreement.share,
        held_out_low=low,
        held_out_high=high,
    )


def serve(config: Config, served: Served, training: TrainingService) -> RewardModelTrainer | None:
    """What requests to train reward models ask."""
    models = training.parts.scorers.reward_models
    return None if models is None else RewardModelTrainer(models, training.parts.journal, config.model)
