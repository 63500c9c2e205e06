"""The device that the base models of a process share: its memory, its schedule, and the runner of each of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.runs import Run
from mlx_parallm.app.base_paths import BasePath
from mlx_parallm.app.parts import Parts
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.config import Config
from mlx_parallm.core.device import MODE_SHARES, DeviceSchedule
from mlx_parallm.core.engine import ModelCard
from mlx_parallm.core.requests import WorkClass
from mlx_parallm.core.text import control_ids
from mlx_parallm.engine.model_check import prove_once
from mlx_parallm.engine.startup import prove
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.errors import ConfigError, UnsupportedModelError
from mlx_parallm.kv.device_memory import DeviceMemory, MemoryAccount, default_budget
from mlx_parallm.model.device import MemoryLimits, machine_memory, memory_limits, on_cpu
from mlx_parallm.model.layer_state import KVLayout
from mlx_parallm.model.manager import SharedModelManager

_DECODE_STALL_S, _CPU_DECODE_STALL_S = 0.1, 0.5
"""Defaults of max_decode_stall_ms, in seconds. On a CPU, a single decode step takes most of 0.1 s."""


def mlx_limits(config: Config) -> MemoryLimits:
    """The memory that MLX may take on this device, as configured."""
    server = config.server
    return memory_limits(machine_memory(), server.mlx_memory_limit, server.mlx_cache_limit, server.wired_memory)


def build_runner(
    manager: SharedModelManager,
    bank: AdapterBank,
    config: Config,
    device: DeviceMemory | None = None,
    exact_length: bool = True,
    parts: Parts | None = None,
) -> BatchRunner:
    """The runner with its KV pool, checked for this architecture. On the device thread.

    Args:
        device: the accounts of the memory; None: those of a process that has this base model only.
        exact_length: `max_model_len` may not be longer than the model's own context. Otherwise the shorter one counts.
        parts: makes the runner and the memory of its KV pool; None: for a whole model.

    Raises:
        ConfigError: the memory budget does not hold one short row.
        UnsupportedModelError: the architecture cannot be batched, or its keys and values cannot be quantized as
            `kv_bits` says.
    """
    if manager.split is None:
        prove_once(manager, bank, config.model.trust_remote_code)
    layout, parts = kv_layout(manager, config), parts or Parts()
    device = device or DeviceMemory(kv_budget(manager.card.weight_bytes, config))
    weights = manager.card.weight_bytes
    device.open_account(MemoryAccount.WEIGHTS, lambda: weights)
    length = _context_length(manager.card, config, exact_length)
    cache = parts.cache(layout, device, length, config.server.prefix_cache, control_ids(manager.tokenizer))
    if not cache.longest_row:
        raise ConfigError(
            f"kv_cache_memory of {device.budget_bytes} bytes is less than one block of this model; "
            f"give at least {cache.smallest_budget}"
        )
    runner = parts.runner(manager.model, cache, bank, manager.plan)
    if manager.split is not None:
        prove(manager, bank, runner)
    return runner


def kv_layout(manager: SharedModelManager, config: Config) -> KVLayout:
    """The shape of keys and values, quantized if `kv_bits` says so.

    Raises:
        UnsupportedModelError: this model's cannot be quantized.
    """
    bits, plan = config.server.kv_bits, manager.plan
    if bits is None:
        return plan.layout
    if plan.in_parts & plan.layout.attention.keys():
        raise UnsupportedModelError(
            f"--kv-bits {bits} needs a model that leaves attention to this server, and {manager.card.name} "
            f"({manager.family.name}) has its own; leave --kv-bits out"
        )
    return plan.layout.quantized(bits)


def kv_budget(weight_bytes: int, config: Config, several: bool = False) -> int:
    """The memory that KV pools, adapters and training share: the configured budget or the default one, in bytes.

    Args:
        weight_bytes: of the base model that the process starts with.
        several: there are several base models, so that at least half of the memory is for weights.
    """
    limits, cpu_ram = mlx_limits(config), machine_memory().ram if on_cpu() else None
    weights = max(weight_bytes, limits.memory // 2) if several else weight_bytes
    return config.server.kv_cache_memory or default_budget(limits.memory, limits.cache, weights, cpu_ram)


def room_for_weights(budget: int, config: Config) -> int:
    """The memory that the weights of all loaded base models may take beside the KV cache, in bytes."""
    limits = mlx_limits(config)
    return limits.memory - limits.cache - budget


def _context_length(card: ModelCard, config: Config, exact: bool) -> int:
    wanted = config.model.max_model_len or card.context_length
    if not exact:
        return min(wanted, card.context_length)
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


@dataclass
class SharedDevice:
    """What the base models of a process share.

    `parts`: makes the parts of an engine: for whole models, or for rank 0 of a model over several machines. `run`: the
    folder of the run, set before the first one is built.
    `budget`: bytes for KV pools, adapters and training, known when the first one is loaded. `memories`: of those that
    are loaded.
    """

    config: Config
    processor: ContinuousBatchProcessor
    bases: tuple[BasePath, ...]
    parts: Parts = field(default_factory=Parts)
    run: Run | None = None
    budget: int = 0
    memories: list[DeviceMemory] = field(default_factory=list)

    def open_memory(self, weight_bytes: int) -> DeviceMemory:
        """The accounts of one more base model. `weight_bytes`: its weights, and those of its draft model."""
        self.budget = self.budget or kv_budget(weight_bytes, self.config, several=len(self.bases) > 1)
        return DeviceMemory(self.budget, self.memories)
