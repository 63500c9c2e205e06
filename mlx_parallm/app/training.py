"""Builds the trainer of the served model, and the service that publishes the versions it makes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.library import AdapterLibrary
from mlx_parallm.adapters.service import AdapterService
from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.config import Config, Mode, ResolvedTraining, RLTrainingConfig
from mlx_parallm.core import BASE_ADAPTER, AdapterRef, EngineClient, TextTokenizer
from mlx_parallm.engine.processor import ContinuousBatchProcessor
from mlx_parallm.errors import ConfigError, RequestError
from mlx_parallm.model.device import on_cpu
from mlx_parallm.model.hooks import install_hook
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.model.split import query_heads
from mlx_parallm.rl.averages import Averages
from mlx_parallm.rl.checkpoints import PolicyCheckpoints
from mlx_parallm.rl.collect.log import TrajectoryLog
from mlx_parallm.rl.environments import Task, answers_of, environment, read_system_prompt, with_system_prompt
from mlx_parallm.rl.evaluation import AnswerSettings, Evaluator, HeldOutTask
from mlx_parallm.rl.gate import Gate
from mlx_parallm.rl.held_out import held_out_tasks
from mlx_parallm.rl.learn.footprint import Footprint
from mlx_parallm.rl.learn.learner import Learner
from mlx_parallm.rl.learn.model import TrainableModel
from mlx_parallm.rl.learn.policy import PolicySnapshot
from mlx_parallm.rl.learn.trainer import GRPOTrainer
from mlx_parallm.rl.policies import PolicyService
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.scoring.catalogue import ScorerCatalogue
from mlx_parallm.rl.scoring.judges import Judge
from mlx_parallm.rl.scoring.reward import RewardSpec, read_reward
from mlx_parallm.rl.scoring.service import ScoringService
from mlx_parallm.rl.service import TrainingParts, TrainingService
from mlx_parallm.rl.tasks import FileTasks


def build_trainer(
    manager: SharedModelManager, bank: AdapterBank, config: Config, memory: int, stall_s: float
) -> GRPOTrainer | None:
    """The trainer, which holds no array of its own; None if training is off. On the device thread.

    Args:
        memory: bytes that requests and training share.
        stall_s: the longest that a decode step should wait for training.

    Raises:
        UnsupportedModelError: the model cannot be trained.
    """
    if not config.rl_training.enabled:
        return None
    head = bank.layout.head
    head_rank = config.model.lora_rank if head is not None and head.target in config.model.lora_target_modules else 0
    training = micro_steps_sized(config.rl_training, manager, bank, memory, stall_s, head_rank)
    return GRPOTrainer(trainable(training, manager, bank, memory), training, config.model)


def micro_steps_sized(
    training: RLTrainingConfig,
    manager: SharedModelManager,
    bank: AdapterBank,
    memory: int,
    stall_s: float,
    head_rank: int = 0,
) -> ResolvedTraining:
    """The settings with micro-steps as large as memory and time allow, unless their size is configured. `head_rank`:
    see `Footprint`; that of the configured layout, because the size is the same for all adapters."""
    checkpointed = training.gradient_checkpointing is not False
    tokens = footprint_of(manager, bank, head_rank).micro_batch_tokens(memory, stall_s, on_cpu(), checkpointed)
    return training.resolved(manager.kv_layout.dtype == mx.float32, tokens)


def trainable(
    training: ResolvedTraining, manager: SharedModelManager, bank: AdapterBank, memory: int
) -> TrainableModel:
    """The model with gradients, which keeps all activations of a micro-step as `gradient_checkpointing` says."""
    checkpointing, footprint = training.gradient_checkpointing, footprint_of(manager, bank)

    def recomputes(tokens: int, context: int, head_rank: int) -> bool:
        if checkpointing is not None:
            return checkpointing
        return not replace(footprint, head_rank=head_rank).fits(tokens, context, False, memory)

    return TrainableModel(manager.model, bank, install_hook(manager.model), recomputes)


def footprint_of(manager: SharedModelManager, bank: AdapterBank, head_rank: int = 0) -> Footprint:
    """What decides how large micro-steps of this model can be, and whether they keep their activations. `head_rank`:
    see `Footprint`."""
    heads, layout = query_heads(manager.model), bank.layout
    return Footprint.of(layout.layers, layout.linears.values(), heads, manager.card.vocab_size, head_rank)


@dataclass(frozen=True, slots=True)
class TrainingRuntime:
    """The service that collects and learns, and its parts. `policies`: those that clients train step by step.
    `averages`: of adapters. `held_out`: the tasks of evaluations, which are not to be trained on."""

    service: TrainingService
    scorers: ScoringService
    learner: Learner
    policies: PolicyService
    averages: Averages
    default_adapter: str
    held_out: tuple[Task, ...] = ()

    async def start(self, restore: bool = True) -> None:
        """Trains the default adapter. `restore`: see `TrainingService.start_adapter`.

        Raises:
            ConfigError, StorageError: the journal of the run cannot be used.
            InvalidRequestError, ConflictError: its live version cannot be trained with this configuration.
        """
        await self.service.start_adapter(self.default_adapter, restore)

    async def close(self) -> None:
        try:
            await self.service.close()
        finally:
            await self.scorers.close()


def build_training(
    processor: ContinuousBatchProcessor,
    trainer: GRPOTrainer,
    adapters: AdapterService,
    store: AdapterStore,
    library: AdapterLibrary,
    tokenizer: TextTokenizer,
    config: Config,
    journal: Journal,
) -> TrainingRuntime:
    """The service that learns from collected trajectories, with its scorers. It closes the journal.

    Raises:
        ConfigError: the held-out tasks, the environment's tasks or the reward cannot be used.
    """
    assert library.checkpoints is not None  # a server that trains has a run
    learner = Learner(processor, trainer)
    training, default = trainer.config, config.adapters.default_adapter
    reward = reward_of(config)
    scorers = ScoringService(
        training.scoring_processes, training.scoring_batch_size, training.scoring_timeout_s, reward
    )

    held_out = held_out_of(config)

    async def weights_of(ref: AdapterRef) -> AdapterWeights:
        with store.registry.lease(str(ref)) as version:
            return await adapters.weights(version)

    async def policy_of(ref: AdapterRef) -> PolicySnapshot:
        return PolicySnapshot(await weights_of(ref), {}, 0)

    parts = TrainingParts(
        learner=learner,
        adapters=adapters,
        checkpoints=PolicyCheckpoints(library.checkpoints, store.registry),
        scorers=scorers,
        config=training,
        checkpointing=config.checkpointing,
        evaluator=evaluator_of(processor, tokenizer, scorers, held_out, config),
        policy_of=policy_of,
        log=TrajectoryLog(training.trajectory_log) if training.trajectory_log else None,
        tasks=_tasks(config),
        journal=journal,
    )
    most = training.tinker.max_models
    policies = PolicyService(
        learner, adapters, parts.checkpoints, store.registry, library.layout, library.max_rank, most
    )
    service = TrainingService(parts, default)
    gate = Gate(eval_floor=training.gate.eval_floor)
    averages = Averages(adapters, parts.evaluator, gate, weights_of, service.has_adapter, library.max_rank)
    return TrainingRuntime(service, scorers, learner, policies, averages, default, held_out)


def reward_of(config: Config) -> RewardSpec | None:
    """The configured reward, with its judge; None if there is none.

    Raises:
        ConfigError: it cannot be read, or it has a judge and there is no server to ask.
    """
    training = config.rl_training
    if training.reward is None:
        return None
    key = training.judge.api_key
    reward = RewardSpec(
        read_reward(training.reward),
        Judge(
            training.judge.url or "",
            training.judge.model or BASE_ADAPTER.name,
            training.judge.instruction or "",
            key.get_secret_value() if key else "",
        ),
    )
    if reward.asks_judge and not reward.judge.url and config.server.mode is Mode.TRAINING_ONLY:
        raise ConfigError(
            "rl_training.judge.url: a judge needs a server, and this process answers no requests; name one with "
            "--judge-url and --judge-model"
        )
    return reward


def check_reward(config: Config) -> None:
    """Loads the functions of the configured reward once, in a child process. It may take seconds.

    Raises:
        ConfigError: the reward cannot be read, a function cannot be loaded, or a judge has no server to ask.
    """
    if config.rl_training.enabled:
        ScorerCatalogue(reward_of(config)).check_reward()


def _tasks(config: Config) -> FileTasks:
    """The tasks of the environment, for requests whose metadata lacks what they have."""
    name, rewarded = config.rl_training.own_environment, config.rl_training.reward is not None
    takes_requests = config.server.mode is not Mode.TRAINING_ONLY
    return answers_of(name, rewarded) if name is not None and takes_requests else FileTasks()


def held_out_of(config: Config) -> tuple[Task, ...]:
    """The held-out tasks; none if versions are not evaluated."""
    settings, of_training = config.rl_training.evaluation, config.rl_training.own_environment
    name, rewarded = settings.tasks or of_training, config.rl_training.reward is not None
    return () if settings.every is None or name is None else held_out_tasks(environment(name, rewarded), settings.size)


def evaluator_of(
    engine: EngineClient,
    tokenizer: TextTokenizer,
    scorers: ScoringService,
    tasks: tuple[Task, ...],
    config: Config,
) -> Evaluator | None:
    if not tasks:
        return None
    reward, training = reward_of(config), config.rl_training
    catalogue = ScorerCatalogue(reward)
    system_prompt, held_out = read_system_prompt(training.system_prompt), []
    for number, task in enumerate(tasks, 1):
        try:
            catalogue.check(task.collection)
            messages = with_system_prompt(task, system_prompt)
            ids = tokenizer.apply_chat_template(messages)
        except RequestError as error:
            raise ConfigError(f"rl_training.evaluation: held-out task {number} cannot be used: {error}") from error
        held_out.append(HeldOutTask(tuple(ids), replace(task.collection, messages=messages)))
    settings = training.evaluation
    answers = AnswerSettings(
        settings.samples, settings.temperature, settings.max_tokens or training.max_completion_tokens
    )
    return Evaluator(engine, scorers, held_out, answers, reward.definition if reward else "")
