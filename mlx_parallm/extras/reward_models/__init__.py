"""Reward models: adapters with a head that score answers, and how they are trained."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_parallm.app.build import Served
    from mlx_parallm.config import Config
    from mlx_parallm.engine.thread import ContinuousBatchProcessor
    from mlx_parallm.extras.reward_models.service import RewardModels
    from mlx_parallm.extras.reward_models.trainer import RewardModelTrainer
    from mlx_parallm.model.manager import SharedModelManager
    from mlx_parallm.rl.service import TrainingService
    from mlx_parallm.server.backend import Backend
    from mlx_parallm.train.trainer import GRPOTrainer


def routes(backend: Backend | None) -> tuple[ModuleType, ...]:
    from mlx_parallm.extras.reward_models import route

    return (route,)


def install(config: Config, served: Served, training: TrainingService) -> RewardModelTrainer | None:
    models = training.parts.scorers.reward_models
    if models is None:
        return None
    from mlx_parallm.extras.reward_models.trainer import RewardModelTrainer

    return RewardModelTrainer(models, training.parts.journal, config.model)


def open_models(
    processor: ContinuousBatchProcessor, trainer: GRPOTrainer, manager: SharedModelManager, config: Config
) -> RewardModels:
    """The reward models of the adapter folder, which the trainer scores with and trains."""
    from mlx_parallm.extras.reward_models.folder import RewardModelFolder
    from mlx_parallm.extras.reward_models.learning import RewardModelDevice
    from mlx_parallm.extras.reward_models.service import RewardModels

    folder = RewardModelFolder(config.adapters.adapter_dir, manager.fingerprint)
    return RewardModels(RewardModelDevice(processor, trainer), folder, manager.tokenizer)
