"""The engine as the event loop sees it: its state, and the protocol that runs requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_parallm.core.device import (
    DECODE_GAPS,
    NO_TIME,
    TRAINING_SHARES,
    DeviceSchedule,
    DeviceSeconds,
    Histogram,
    PauseMode,
)
from mlx_parallm.core.json_values import ANSWER
from mlx_parallm.core.machine import UNKNOWN_MACHINE, MachineState
from mlx_parallm.core.requests import Event, GenerationRequest


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The base model."""

    __pydantic_config__ = ANSWER

    name: str
    """The name that `model` accepts."""
    context_length: int
    """Maximum number of tokens of prompt and answer together."""
    vocab_size: int
    """Size of the vocabulary. Token ids are smaller."""
    quantization: str
    """Quantization of the weights as loaded."""
    dtype: str
    """Type of the activations."""
    parameters: int
    """Number of parameters."""
    weight_bytes: int
    """Bytes of the weights in memory."""
    aliases: tuple[str, ...] = ()
    """Other names that `model` accepts for it."""
    tokenizer: str = ""
    """The folder from which programs on this machine can load its tokenizer; empty if there is none, and for keys with
    the role `inference`."""
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    """The values of sampling fields that a request leaves out, where they are not OpenAI's, and `max_new_tokens`, the
    number of tokens in chats."""
    architecture: str = ""
    """The model's family, such as `llama`; empty if it is not known."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the served model. The first one is used in responses."""
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of counters and gauges, taken without stopping the engine. Names ending in `_total` only grow.

    Attributes:
        kv_bytes_held, kv_bytes_budget: the memory of the KV pool that rows hold, and the pool's limit.
        kv_bytes_cached: the memory of cached prefixes that no row uses. It is not part of `kv_bytes_held`, because rows
            get it when they need it.
        kv_block_tokens, kv_blocks: tokens of a block of the KV pool, and the blocks that fit its limit.
        memory_bytes: device memory by what it is held for; see `kv.device_memory.Account`.
        prefix_cache_queries_total, prefix_cache_hits_total: prompt tokens that were looked up in the prefix cache, and
            those whose keys and values were taken from it. They count as `RequestFinished.cached_tokens` does.
        external_prefix_cache_queries_total, external_prefix_cache_hits_total: prompt tokens that were looked up on the
            disk because the prefix cache did not have them, and those that were read back into it.
        draft_tokens_total, accepted_draft_tokens_total: guessed tokens that were computed, and those that were right.
        training_share: training's share of device time in the last time window, with or without rows waiting.
        device_seconds: what the device has worked on since start.
        taken_at: when the snapshot was taken, on the monotonic clock.
        paused: `pause` was called and `resume` was not. Requests may still be running.
        machine: what is known of the machine, and what is done about it.
        detail: JSON values for `/debug/state`.
        bases: the same of each base model by its name, if there are several.
    """

    alive: bool
    ready: bool
    running: int = 0
    waiting: int = 0
    kv_bytes_held: int = 0
    kv_bytes_budget: int = 0
    kv_bytes_cached: int = 0
    kv_tokens_used: int = 0
    kv_block_tokens: int = 0
    kv_blocks: int = 0
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    external_prefix_cache_queries_total: int = 0
    external_prefix_cache_hits_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    draft_tokens_total: int = 0
    accepted_draft_tokens_total: int = 0
    aborted_total: int = 0
    failed_steps_total: int = 0
    schedule: DeviceSchedule = field(default_factory=DeviceSchedule)
    decode_gaps: Histogram = DECODE_GAPS
    training_shares: Histogram = TRAINING_SHARES
    training_share: float = 0.0
    device_seconds: DeviceSeconds = NO_TIME
    taken_at: float = 0.0
    paused: bool = False
    machine: MachineState = UNKNOWN_MACHINE
    detail: Mapping[str, Any] = field(default_factory=dict)
    bases: Mapping[str, EngineStats] = field(default_factory=dict)


class EngineClient(Protocol):
    """The asyncio interface of the engine, used on the event loop's thread only.

    Every coroutine and iterator raises EngineDeadError if the device thread is not running.
    """

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Yields the request's events; the last one is terminal.

        Closing the iterator (`aclose`, or cancelling the task that reads it) aborts the request and frees its rows.
        """

    def stats(self) -> EngineStats:
        """The current counters and gauges. Never waits for the device."""

    async def reschedule(self, schedule: DeviceSchedule) -> None:
        """Applies a new schedule from the next unit on. When it returns, `stats` shows the new schedule."""

    async def pause(self, mode: PauseMode) -> None:
        """Pauses sampling: new requests wait for `resume`, and `mode` says what happens to running ones.

        Returns when the mode's effect is complete, or when a later `pause` or `resume` has replaced this one. Training
        and staging continue.
        """

    async def resume(self) -> None:
        """Ends a pause. Does nothing if the engine is not paused."""

    async def reset_prefix_cache(self, files: bool = False) -> int:
        """Forgets every cached prefix between two units, and returns the number of tokens that were cached in memory.

        Running rows keep their keys and values. A later request computes its prompt again. With `files`, the files of
        cached prefixes are removed too, before this returns.

        Raises:
            StorageError: a file cannot be removed.
        """

    async def sleep(self, bank: bool = False) -> None:
        """Frees the memory that only sampling needs, once running requests have ended.

        This is the KV pool, with all cached prefixes, and MLX's buffer cache. With `bank`, adapter slots are freed too;
        versions without a file stay in memory as copies. The next request allocates everything again, so the caller
        must hold requests back.
        """
