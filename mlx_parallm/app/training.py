"""Builds the trainer of the served model, and the service that publishes the versions it makes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.service import AdapterService
from mlx_parallm.app.adapters import KnownAdapters
from mlx_parallm.app.parts import Parts
from mlx_parallm.config import Config, Mode, ResolvedTraining, RLTrainingConfig
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.engine.model_check import kept_verdict
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.extras_table import needed
from mlx_parallm.model.cache_plan import CachePlan
from mlx_parallm.model.device import on_cpu
from mlx_parallm.model.families import untried_packages
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.rl.checkpoints import PolicyCheckpoints
from mlx_parallm.rl.configured_reward import judge_of, reward_key, reward_of
from mlx_parallm.rl.environments import answers_of, read_system_prompt
from mlx_parallm.rl.environments.files import FileTasks
from mlx_parallm.rl.environments.names import read_text
from mlx_parallm.rl.environments.thread import EnvironmentThread
from mlx_parallm.rl.held_out_tasks import HeldOutTasks, evaluator_of, held_out_of
from mlx_parallm.rl.parts import TrainingParts
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.scoring.scorers import REWARD_MODEL, RewardSpec
from mlx_parallm.rl.scoring.service import ScoringService
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.teachers import Teacher, engine_score
from mlx_parallm.rl.trajectory_log import TrajectoryLog
from mlx_parallm.train.check import gradients
from mlx_parallm.train.footprint import Footprint
from mlx_parallm.train.learner import Learner
from mlx_parallm.train.model import TrainableModel
from mlx_parallm.train.packed_pass import SEGMENT, SHORT_SEGMENT
from mlx_parallm.train.policy import PolicySnapshot
from mlx_parallm.train.trainer import GRPOTrainer

if TYPE_CHECKING:
    from mlx_parallm.extras.reward_models.service import RewardModels


def build_trainer(
    manager: SharedModelManager,
    bank: AdapterBank,
    config: Config,
    memory: int,
    stall_s: float,
    parts: Parts,
) -> GRPOTrainer | None:
    """The trainer, which holds no array of its own; None if training is off. On the device thread.

    Args:
        memory: bytes that requests and training share.
        stall_s: the longest that a decode step should wait for training.
        parts: makes the model with gradients.

    Raises:
        UnsupportedModelError: the model cannot be trained.
    """
    if not config.rl_training.enabled:
        return None
    if not bank.layout.linears:
        raise UnsupportedModelError(f"{manager.card.name} can be served and not trained: no adapter may change it")
    head = bank.layout.head
    head_rank = config.model.lora_rank if head is not None and head.target in config.model.lora_target_modules else 0
    footprint = footprint_of(manager.model, manager.plan, bank, head_rank)
    training = micro_steps_sized(config.rl_training, footprint, manager, memory, stall_s)
    model = trainable(training, footprint, manager, bank, memory, parts)
    return GRPOTrainer(model, training, config.model, memory=memory)


def micro_steps_sized(
    training: RLTrainingConfig, footprint: Footprint, manager: SharedModelManager, memory: int, stall_s: float
) -> ResolvedTraining:
    """The settings with micro-steps as large as memory and time allow, unless their size is configured. `footprint`:
    with the head's rank of the configured layout, because the size is the same for all adapters."""
    float32, checkpointed = manager.plan.layout.dtype == mx.float32, training.gradient_checkpointing is not False
    if training.micro_batch_tokens is not None:
        return training.resolved(float32)
    return training.resolved(float32, footprint.micro_batch_tokens(memory, stall_s, on_cpu(), checkpointed))


def trainable(
    training: ResolvedTraining,
    footprint: Footprint,
    manager: SharedModelManager,
    bank: AdapterBank,
    memory: int,
    parts: Parts,
) -> TrainableModel:
    """The model with gradients, which keeps all activations of a micro-step as `gradient_checkpointing` says.

    Raises:
        UnsupportedModelError: the model cannot be trained.
    """
    checkpointing = training.gradient_checkpointing

    def recomputes(tokens: int, context: int, head_rank: int) -> bool:
        if checkpointing is not None:
            return checkpointing
        return not replace(footprint, head_rank=head_rank).fits(tokens, context, False, memory)

    found = parts.trainable(manager, bank, recomputes, footprint.segment)
    if manager.split is None and (untried_packages() or not manager.family.tested):
        verdict = kept_verdict(manager)
        known = gradients(found, manager.model, manager.plan.vocab_size) if verdict is None else verdict.of("gradients")
        if known.problem:
            raise UnsupportedModelError(f"{manager.card.name} can be served and not trained: {known.problem}")
    return found


def footprint_of(model: nn.Module, plan: CachePlan, bank: AdapterBank, head_rank: int = 0) -> Footprint:
    """What decides how large micro-steps of this model can be, and whether they keep their activations. `head_rank`:
    see `Footprint`."""

    def of(segment: int) -> Footprint:
        trained = TrainableModel(model, bank, plan, lambda *_: True, segment)
        return Footprint.of(trained, plan.vocab_size, head_rank)

    footprint = of(SEGMENT)
    if not plan.layout.recurrent:
        return footprint
    short = of(SHORT_SEGMENT)
    least, most = (each.trunk(SEGMENT, SEGMENT).backward for each in (short, footprint))
    return short if most > 2 * (SEGMENT / SHORT_SEGMENT) * least else footprint


@dataclass(frozen=True, slots=True)
class TrainingInputs:
    """What training reads of files and packages, before the model is loaded.

    Attributes:
        held_out: the tasks of evaluations; None: versions are not evaluated.
        tasks: those of the environment, for requests whose metadata lacks what they have.
        teacher_prompt: the instruction that a teacher sees before each prompt.
    """

    reward: RewardSpec | None
    held_out: HeldOutTasks | None
    tasks: FileTasks
    teacher_prompt: str

    @classmethod
    def of(cls, config: Config) -> TrainingInputs:
        """Raises ConfigError: the held-out tasks, the environment's tasks, a prompt or the reward cannot be used."""
        teacher = read_text("rl_training.teacher.prompt", config.rl_training.teacher.prompt) or ""
        read_system_prompt(config.rl_training.system_prompt)
        return cls(reward_of(config), held_out_of(config), _tasks(config), teacher)


def build_training(
    processor: ContinuousBatchProcessor,
    trainer: GRPOTrainer,
    adapters: AdapterService,
    known: KnownAdapters,
    tokenizer: TextTokenizer,
    config: Config,
    journal: Journal,
    reward_models: RewardModels | None,
    inputs: TrainingInputs,
) -> TrainingService:
    """The service that learns from collected trajectories, with its scorers. It closes the journal.

    Raises:
        ConfigError: the reward models or the held-out tasks cannot be used with this model.
    """
    checkpoints = known.library.checkpoints
    assert checkpoints is not None  # a server that trains has a run
    training = trainer.config
    held_out, thread = inputs.held_out, EnvironmentThread()
    scorers = ScoringService(
        training.scoring_processes,
        training.scoring_batch_size,
        training.scoring_timeout_s,
        inputs.reward,
        reward_models,
        judge_of(config),
    )

    scorers.catalogue.check_reward(REWARD_MODEL)

    async def policy_of(ref: AdapterRef) -> PolicySnapshot:
        with known.registry.lease(str(ref)) as version:
            return PolicySnapshot(await adapters.weights(version), {}, 0)

    parts = TrainingParts(
        learner=Learner(processor, trainer),
        adapters=adapters,
        checkpoints=PolicyCheckpoints(checkpoints, known.registry),
        scorers=scorers,
        config=training,
        checkpointing=config.checkpointing,
        evaluator=evaluator_of(processor, tokenizer, scorers, thread, held_out, config),
        policy_of=policy_of,
        log=TrajectoryLog(training.trajectory_log) if training.trajectory_log else None,
        tasks=inputs.tasks,
        journal=journal,
        teacher=_teacher(processor, adapters, tokenizer, training, inputs.teacher_prompt),
        environment_thread=thread,
        held_out=() if held_out is None else held_out.tasks,
        reward_key=reward_key(config),
    )
    return TrainingService(parts, config.adapters.default_adapter)


def _teacher(
    engine: ContinuousBatchProcessor,
    adapters: AdapterService,
    tokenizer: TextTokenizer,
    training: ResolvedTraining,
    prompt: str,
) -> Teacher | None:
    """What distillation imitates; None if the loss is another one."""
    config = training.teacher
    if not training.loss.reads_teacher:
        return None
    bos = tokenizer.encode(tokenizer.bos_token, False) if tokenizer.bos_token else []
    prompt_ids, bos_id = tokenizer.encode(prompt, False), bos[0] if len(bos) == 1 else None
    if config.url is None:
        return Teacher(engine_score(engine, adapters, config.adapter), config.timeout_s, prompt_ids, bos_id)
    score, close = needed("engines.teacher", "rl_training.teacher.url").teacher_at(config)
    return Teacher(score, config.timeout_s, prompt_ids, bos_id, close)


def _tasks(config: Config) -> FileTasks:
    """The tasks of the environment, for requests whose metadata lacks what they have."""
    name, rewarded = config.rl_training.own_environment, config.rl_training.reward is not None
    takes_requests = config.server.mode is not Mode.TRAINING_ONLY
    return answers_of(name, rewarded) if name is not None and takes_requests else FileTasks()
