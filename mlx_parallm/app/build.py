"""Builds the parts of a server from its configuration, in this order:

configuration → memory limits → base model → adapter bank → KV pool and runner → adapters → training → engine
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.checkpoints.runs import JOURNAL, Run, open_run
from mlx_parallm.adapters.service import AdapterService
from mlx_parallm.app.adapters import build_store
from mlx_parallm.app.reward import check_reward
from mlx_parallm.app.training import TrainingRuntime, build_reward_models, build_trainer, build_training
from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS
from mlx_parallm.batch.kv.cache import LoRABatchedKVCache
from mlx_parallm.batch.kv.disk import PrefixStore
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.config import Config
from mlx_parallm.core import (
    MODE_SHARES,
    Account,
    DeviceMemory,
    DeviceSchedule,
    EngineClient,
    Event,
    GenerationRequest,
    ModelCard,
    WorkClass,
    default_budget,
)
from mlx_parallm.engine.live import Vocabulary
from mlx_parallm.engine.loop import EngineParts
from mlx_parallm.engine.processor import ContinuousBatchProcessor
from mlx_parallm.engine.startup import calibrate, check_unproved, choose_attention
from mlx_parallm.errors import ConfigError, StorageError
from mlx_parallm.model.device import (
    MemoryLimits,
    device_name,
    machine_memory,
    memory_limits,
    on_cpu,
    set_limits,
)
from mlx_parallm.model.hooks import install_hook
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.model.tokenizer import Tokenizer, detokenizer_for
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.record import RunFile, RunState
from mlx_parallm.rl.runs.store import JournalFile
from mlx_parallm.rl.tracking.trackers import check_installed
from mlx_parallm.scheduler.scheduler import SchedulerConfig

_log = logging.getLogger(__name__)

_DECODE_STALL_S, _CPU_DECODE_STALL_S = 0.1, 0.5
"""Defaults of max_decode_stall_ms, in seconds. On a CPU, a single decode step takes most of 0.1 s."""


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model, as the HTTP server and the train command use it.

    card: the base model; its `context_length` is the longest sequence that the server can hold
    limits: the memory that MLX may take
    engine: answers generation requests
    training: None if the server does not train
    run: the folder of checkpoints; None if no checkpoints are saved
    """

    card: ModelCard
    tokenizer: Tokenizer
    device: str
    limits: MemoryLimits
    adapters: AdapterService
    engine: EngineClient
    training: TrainingRuntime | None
    run: Run | None

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Answers a request (see `core.EngineClient`), and collects it for training if it has a `collection`."""
        return self.collect(request, self.engine.generate(request))

    def collect(self, request: GenerationRequest, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        """Passes on the events of a request, and collects it for training if it has a `collection`."""
        if self.training is None or request.collection is None:
            return events
        return self.training.service.trajectories.collect(request, events)


class Engine:
    """A model on its own device thread, ready to generate between `start` and `stop`."""

    def __init__(self, config: Config, command: Mapping[str, Any] | None = None) -> None:
        """`command`: what the run is for, in its record; see `rl.runs.record.RunRecord`."""
        self._config = config
        self._command = command or {}
        self._served: Served | None = None
        self._run: Run | None = None
        self._record: RunFile | None = None
        self._ending = (RunState.FINISHED, "")
        self.processor = ContinuousBatchProcessor(self._build, debug=config.debug.check_when_idle)

    def start(self) -> Served:
        """Loads the model, its adapters and checkpoints.

        Raises:
            ModelError, ConfigError: they cannot be loaded, or the package of a tracker is not installed.
        """
        check_reward(self._config)
        checkpointing, training = self._config.checkpointing, self._config.rl_training.enabled
        check_installed(self._config.rl_training.trackers)
        self._run = open_run(checkpointing.checkpoint_dir, checkpointing.resume, wanted=training)
        try:
            self.processor.start()
            assert self._served is not None
            if self._run is not None and training:
                self._record = self._begin_record(self._run, self._served)
        except BaseException:  # an interrupt too: the folder must not stay locked
            self.processor.stop()
            self._close_run()
            raise
        return self._served

    def _begin_record(self, run: Run, served: Served) -> RunFile:
        cards = {card.ref.name: card for card in served.adapters.cards() if card.live}
        lineage = {name: f"{card.ref} of {card.root}" if card.root else str(card.ref) for name, card in cards.items()}
        return RunFile(run.path, run.id, self._config.model_dump(mode="json"), self._command, lineage)

    def ends(self, state: RunState, reason: str = "") -> None:
        """Says how the run has ended, for its record. Without a call, it has finished."""
        self._ending = (state, reason)

    @contextmanager
    def failures_recorded(self) -> Iterator[None]:
        """An error that leaves the block is in the run's record, and an interrupt too."""
        try:
            yield
        except Exception as error:  # whatever it is, it is recorded and raised again
            self.ends(RunState.FAILED, str(error) or type(error).__name__)
            raise
        except BaseException:  # Ctrl-C, or the end of the event loop: recorded and raised again
            self.ends(RunState.INTERRUPTED, "it was interrupted")
            raise

    def stop(self) -> None:
        """Ends the device thread and releases the run's folder to other processes."""
        self.processor.stop()
        self._close_run()

    def _close_run(self) -> None:
        if self._record is not None:
            try:
                self._record.end(*self._ending)
            except StorageError as error:
                _log.error("%s", error)
            self._record = None
        if self._run is not None:
            self._run.close()
            self._run = None

    def _build(self) -> EngineParts:
        parts, self._served = build(self._config, self.processor, self._run)
        return parts


def build(config: Config, processor: ContinuousBatchProcessor, run: Run | None) -> tuple[EngineParts, Served]:
    """Builds all parts of the server. It runs on the device thread, which then owns the arrays."""
    limits = mlx_limits(config)
    set_limits(limits)
    manager = SharedModelManager(
        config.model.base_model_path,
        trust_remote_code=config.model.trust_remote_code,
        allow_special_tokens=config.model.allow_special_tokens,
    )
    bank = manager.install_bank(config.adapters.max_loras, config.adapters.max_lora_rank)
    runner = build_runner(manager, bank, config)
    choose_attention(runner)
    name, *aliases = config.server.served_model_name or (manager.card.name,)
    card = replace(manager.card, name=name, aliases=tuple(aliases), context_length=runner.cache.longest_row)
    store, library = build_store(manager, bank, config, run, processor.wake, card.names)
    adapters = AdapterService(processor, store, library, frozenset(card.names), config.adapters.serve_folder)
    tokenizer = manager.tokenizer
    schedule = device_schedule(config, on_cpu())
    trainer = build_trainer(manager, bank, config, runner.cache.device.budget_bytes, schedule.max_decode_stall_s)
    training, work = None, None
    if trainer is not None:
        assert run is not None  # a server that trains has a run
        journal = Journal(JournalFile(run.path / JOURNAL, manager.fingerprint))
        reward_models, work = build_reward_models(processor, trainer, manager, config)
        training = build_training(
            processor, trainer, adapters, store, library, tokenizer, config, journal, reward_models
        )
    served = Served(card, tokenizer, device_name(), limits, adapters, processor, training, run)
    parts = EngineParts(
        runner,
        store,
        Vocabulary(card.vocab_size, tokenizer.eos_token_ids, detokenizer_for(tokenizer)),
        SchedulerConfig(
            max_rows=config.server.max_batch_size,
            max_batched_tokens=config.server.max_batched_tokens,
            schedule=schedule,
        ),
        calibrate(runner),
        work,
        lookahead=not on_cpu() if config.debug.lookahead is None else config.debug.lookahead,
        trace=config.debug.trace,
        check_every_unit=config.debug.check_every_unit,
        queue_timeout_s=config.server.queue_timeout,
        limits=limits,
        prefix_store=build_prefix_store(manager, config, processor.wake),
    )
    mx.reset_peak_memory()
    return parts, served


# -- memory, KV pool and runner ------------------------------------------------------------------


def mlx_limits(config: Config) -> MemoryLimits:
    """The memory that MLX may take on this device, as configured."""
    return memory_limits(machine_memory(), config.server.mlx_memory_limit, config.server.mlx_cache_limit)


def build_runner(manager: SharedModelManager, bank: AdapterBank, config: Config) -> BatchRunner:
    """The runner with its KV pool, checked for this architecture. On the device thread.

    Raises:
        ConfigError: the memory budget does not hold one short row.
        UnsupportedModelError: the architecture cannot be batched.
    """
    layout = manager.kv_layout
    device = build_memory(manager.card, config)
    cache = LoRABatchedKVCache(
        layout, device, _context_length(manager.card, config), keep_prefixes=config.server.prefix_cache
    )
    if not cache.longest_row:
        raise ConfigError(
            f"kv_cache_memory of {device.budget_bytes} bytes is less than one block of this model; "
            f"give at least {BLOCK_TOKENS * layout.bytes_per_token}"
        )
    runner = BatchRunner(manager.model, cache, bank, install_hook(manager.model), manager.card.vocab_size)
    check_unproved(manager, runner)
    return runner


def build_memory(card: ModelCard, config: Config) -> DeviceMemory:
    """The accounts of the device's memory, with the configured budget or the default one."""
    limits, cpu_ram = mlx_limits(config), machine_memory().ram if on_cpu() else None
    budget = config.server.kv_cache_memory or default_budget(limits.memory, limits.cache, card.weight_bytes, cpu_ram)
    device = DeviceMemory(budget)
    device.open_account(Account.WEIGHTS, lambda: card.weight_bytes)
    return device


def build_prefix_store(manager: SharedModelManager, config: Config, wake: Callable[[], None]) -> PrefixStore | None:
    """The files of the prefix cache, None if it is kept in memory only. `wake`: see `PrefixStore`.

    Raises:
        ConfigError: the folder cannot be used, or there is no prefix cache.
    """
    folder = config.server.prefix_cache_dir
    if folder is None:
        return None
    if not config.server.prefix_cache:
        raise ConfigError("--prefix-cache-dir keeps the prefix cache on the disk; leave --no-prefix-cache out")
    worker = ThreadPoolExecutor(1, thread_name_prefix="prefix-cache")
    try:
        return PrefixStore(
            folder, manager.fingerprint, manager.kv_layout, config.server.prefix_cache_disk, worker, wake
        )
    except OSError as error:
        raise ConfigError(
            f"cached prefixes cannot be kept in {folder} ({error.strerror}): give --prefix-cache-dir a folder that "
            "this user can write"
        ) from error


def _context_length(card: ModelCard, config: Config) -> int:
    wanted = config.model.max_model_len or card.context_length
    if wanted > card.context_length:
        raise ConfigError(f"max_model_len {wanted} is more than the model's context of {card.context_length}; lower it")
    return wanted


# -- scheduling ----------------------------------------------------------------------------------


def device_schedule(config: Config, cpu: bool) -> DeviceSchedule:
    """How the device is shared, with the defaults of the mode and the device. `cpu`: MLX computes on the CPU."""
    server = config.server
    mode_share = MODE_SHARES.get(server.mode.value, DeviceSchedule().training_time_share)
    stall_ms = server.max_decode_stall_ms
    return DeviceSchedule(
        training_time_share=config.rl_training.training_time_share or mode_share,
        max_decode_stall_s=stall_ms / 1000 if stall_ms else _CPU_DECODE_STALL_S if cpu else _DECODE_STALL_S,
        row_shares={
            WorkClass.INFERENCE: server.priority_ratios.inference,
            WorkClass.TRAINING: server.priority_ratios.training,
        },
    )
