"""Builds what trains: the trainer over the served model, and the loop that makes versions of it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.app.publisher import AdapterPublisher
from mlx_parallm.app.training_settings import loop_settings, trainer_settings
from mlx_parallm.config import Config
from mlx_parallm.core import AdapterRef, EngineClient, TextTokenizer
from mlx_parallm.engine.processor import ContinuousBatchProcessor
from mlx_parallm.model.attention import install_hook
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.rl.collecting import CollectingEngine
from mlx_parallm.rl.evaluation import Evaluation, read_prompts
from mlx_parallm.rl.learner import DeviceLearner
from mlx_parallm.rl.parts import Scorers
from mlx_parallm.rl.scoring.catalogue import Catalogue
from mlx_parallm.rl.scoring.service import ScoringService
from mlx_parallm.rl.service import TrainingParts, TrainingService
from mlx_parallm.rl.settings import Algorithm
from mlx_parallm.rl.snapshot import PolicySnapshot
from mlx_parallm.rl.spill import SpillFile
from mlx_parallm.rl.trainable import TrainableModel
from mlx_parallm.rl.trainer import GRPOTrainer


def build_trainer(manager: SharedModelManager, bank: AdapterBank, config: Config) -> GRPOTrainer | None:
    """On the device thread; holds no array of its own. None where training is off.

    Raises:
        UnsupportedModelError: the model cannot be trained.
    """
    if not config.rl_training.enabled:
        return None
    settings = trainer_settings(config, float32=manager.kv_dtype == mx.float32)
    trainable = TrainableModel(manager.model, bank, install_hook(manager.model), settings.checkpoint_layers)
    return GRPOTrainer(trainable, settings)


@dataclass(frozen=True, slots=True)
class Training:
    """`engine` collects what is marked; `service` learns from it."""

    service: TrainingService
    engine: EngineClient
    scorers: ScoringService
    publisher: AdapterPublisher
    default_adapter: str
    routed: bool

    async def start(self) -> None:
        """Begins with the default adapter; requests that name none go to it once it has a version.

        Raises:
            InvalidRequestError, ConflictError: its live version cannot be trained on with this configuration.
        """
        await self.service.start_adapter(self.default_adapter)
        if not self.routed:
            self.publisher.serve_default()

    async def close(self) -> None:
        try:
            await self.service.close()
        finally:
            await self.scorers.close()


def build_training(
    processor: ContinuousBatchProcessor,
    trainer: GRPOTrainer,
    learner: DeviceLearner,
    publisher: AdapterPublisher,
    tokenizer: TextTokenizer,
    config: Config,
) -> Training:
    """On the event loop's thread.

    Raises:
        ConfigError: the evaluation prompts cannot be used.
    """
    training = config.rl_training
    scorers = ScoringService(training.scoring_processes, training.scoring_batch_size, training.scoring_timeout_s)

    async def policy_of(ref: AdapterRef) -> PolicySnapshot:
        return PolicySnapshot((await publisher.weights(str(ref)))[1], {}, 0)

    parts = TrainingParts(
        learner=learner,
        publisher=publisher,
        scorers=scorers,
        settings=loop_settings(config),
        imitation=trainer.settings.loss.algorithm is Algorithm.CROSS_ENTROPY,
        evaluate=_evaluation(processor, tokenizer, scorers, config),
        policy_of=policy_of,
        spill=SpillFile(training.trajectory_log) if training.trajectory_log else None,
    )
    service = TrainingService(parts, config.adapters.default_adapter)
    engine = CollectingEngine(processor, service)
    serve = config.adapters.serve
    return Training(service, engine, scorers, publisher, config.adapters.default_adapter, serve is not None)


def _evaluation(engine: EngineClient, tokenizer: TextTokenizer, scorers: Scorers, config: Config) -> Evaluation | None:
    gate = config.rl_training.gate
    if gate.eval_prompts is None or gate.eval_floor is None:
        return None
    prompts = read_prompts(gate.eval_prompts, tokenizer, Catalogue().check)
    return Evaluation(engine, scorers, prompts, gate.eval_floor, config.rl_training.max_completion_tokens)
