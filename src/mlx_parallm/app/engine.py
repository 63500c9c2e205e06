"""A model with its adapters, loaded on its own device thread: everything below the HTTP face."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.library import AdapterLibrary
from mlx_parallm.adapters.runs import Run, open_run
from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.app.adapters import build_bank, build_store
from mlx_parallm.app.publisher import AdapterPublisher
from mlx_parallm.app.schedule import device_schedule
from mlx_parallm.app.training import Training, build_trainer, build_training
from mlx_parallm.batch.kv_cache import LoRABatchedKVCache
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.config import Config
from mlx_parallm.core import EngineClient, ModelCard
from mlx_parallm.engine.adapters import AdapterService
from mlx_parallm.engine.calibrate import calibrate
from mlx_parallm.engine.live import Vocabulary
from mlx_parallm.engine.loop import EngineParts
from mlx_parallm.engine.offsets import check_unproved
from mlx_parallm.engine.processor import ContinuousBatchProcessor
from mlx_parallm.errors import ConfigError
from mlx_parallm.model.attention import install_hook
from mlx_parallm.model.detokenizer import Detokenizer
from mlx_parallm.model.device import device_name, on_cpu, ram_bytes
from mlx_parallm.model.layout import KVLayout
from mlx_parallm.model.limits import MemoryLimits, device_figures, memory_limits, set_limits
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.model.tokenizer import Tokenizer
from mlx_parallm.rl.learner import DeviceLearner
from mlx_parallm.rl.trainer import GRPOTrainer
from mlx_parallm.scheduler.rl_aware import SchedulerConfig

_CPU_SHARE = 0.25
"""Of RAM, at most, for the KV pool on a CPU."""
_POOL_SHARE = 0.8
"""Of what weights and MLX's buffer cache leave of its memory limit, for the KV pool."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the HTTP face needs of a loaded model. `card.context_length` is what the server can hold.

    `limits`: what MLX may take. `engine`: what requests are given to. `training` None: this server does not train.
    `run` None: it keeps no checkpoints.
    """

    card: ModelCard
    tokenizer: Tokenizer
    device: str
    limits: MemoryLimits
    adapters: AdapterService
    engine: EngineClient
    training: Training | None
    run: Run | None


class Engine:
    """A model, loaded on its own device thread and ready to generate."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._served: Served | None = None
        self._run: Run | None = None
        self.processor = ContinuousBatchProcessor(self._build, debug=config.server.debug)

    def start(self) -> Served:
        """Loads the model, its adapters and checkpoints. Raises what that raises: `ModelError`, `ConfigError`."""
        kept, training = self._config.checkpointing, self._config.rl_training.enabled
        self._run = open_run(kept.checkpoint_dir, kept.resume, wanted=training)
        try:
            self.processor.start()
        except BaseException:  # an interrupt too: the folder must not stay locked
            self._close_run()
            raise
        assert self._served is not None
        return self._served

    def stop(self) -> None:
        """Ends the device thread; another process may use the run's folder then."""
        self.processor.stop()
        self._close_run()

    def _close_run(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None

    def _build(self) -> EngineParts:
        config, limits = self._config, mlx_limits(self._config)
        set_limits(limits)
        manager = SharedModelManager.load(
            config.model.base_model_path,
            trust_remote_code=config.model.trust_remote_code,
            allow_special_tokens=config.model.allow_special_tokens,
        )
        bank = build_bank(manager, config)
        runner = build_runner(manager, bank, config)
        card = _served_card(manager.card, runner, config)
        store, library = build_store(bank, manager, config, self._run, self.processor.wake)
        service = AdapterService(self.processor, store, library, reserved=frozenset({card.name}))
        trainer = build_trainer(manager, bank, config)
        training = self._training(trainer, service, store, library, manager.tokenizer) if trainer else None
        engine = training.engine if training else self.processor
        self._served = Served(card, manager.tokenizer, device_name(), limits, service, engine, training, self._run)
        parts = EngineParts(
            runner,
            store,
            _vocabulary(manager),
            _scheduler_config(config),
            calibrate(runner),
            trainer,
            lookahead=not on_cpu(),
            queue_timeout_s=config.server.queue_timeout,
            limits=limits,
        )
        mx.reset_peak_memory()
        return parts

    def _training(
        self,
        trainer: GRPOTrainer,
        service: AdapterService,
        store: AdapterStore,
        library: AdapterLibrary,
        tokenizer: Tokenizer,
    ) -> Training:
        assert library.checkpoints is not None  # a server that trains has a run
        learner = DeviceLearner(self.processor, trainer)
        publisher = AdapterPublisher(service, store.books, learner, library.checkpoints)
        return build_training(self.processor, trainer, learner, publisher, tokenizer, self._config)


def build_runner(manager: SharedModelManager, bank: AdapterBank, config: Config) -> BatchRunner:
    """The runner and its KV pool, proved for this architecture. On the device thread.

    Raises:
        ConfigError: the memory budget does not hold one short row.
        UnsupportedModelError: the architecture cannot be batched.
    """
    layout = KVLayout(manager.layers, manager.kv_dtype)
    budget = config.server.kv_cache_memory or _default_budget(manager.card, mlx_limits(config))
    cache = LoRABatchedKVCache(layout, budget, _context_length(manager.card, config))
    if not cache.can_ever_hold(1):
        raise ConfigError(
            f"kv_cache_memory of {budget} bytes holds {cache.budget_tokens} tokens of this model; "
            f"give at least {cache.capacity_for(1) * layout.bytes_per_token}"
        )
    runner = BatchRunner(manager.model, cache, bank, install_hook(manager.model), manager.card.vocab_size)
    check_unproved(manager, runner)
    return runner


def _context_length(card: ModelCard, config: Config) -> int:
    wanted = config.model.max_model_len or card.context_length
    if wanted > card.context_length:
        raise ConfigError(f"max_model_len {wanted} is more than the model's context of {card.context_length}; lower it")
    return wanted


def mlx_limits(config: Config) -> MemoryLimits:
    """What MLX may take on this device, as configured."""
    return memory_limits(device_figures(), config.server.mlx_memory_limit, config.server.mlx_cache_limit)


def _default_budget(card: ModelCard, limits: MemoryLimits) -> int:
    free = int(_POOL_SHARE * max(limits.memory - limits.cache - card.weight_bytes, 0))
    return min(free, int(_CPU_SHARE * ram_bytes())) if on_cpu() else free


def _served_card(card: ModelCard, runner: BatchRunner, config: Config) -> ModelCard:
    return replace(
        card,
        name=config.server.served_model_name or card.name,
        context_length=runner.cache.longest_row,
    )


def _vocabulary(manager: SharedModelManager) -> Vocabulary:
    tokenizer = manager.tokenizer
    return Vocabulary(manager.card.vocab_size, tokenizer.eos_token_ids, partial(Detokenizer, tokenizer))


def _scheduler_config(config: Config) -> SchedulerConfig:
    return SchedulerConfig(
        max_rows=config.server.max_batch_size,
        max_batched_tokens=config.server.max_batched_tokens,
        schedule=device_schedule(config, on_cpu()),
    )
