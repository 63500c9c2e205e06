"""The engine as the event loop sees it: its model, and the protocol that runs requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mlx_parallm.core.device import DeviceSchedule, PauseMode
from mlx_parallm.core.json_values import ANSWER
from mlx_parallm.core.requests import Event, GenerationRequest

if TYPE_CHECKING:
    from mlx_parallm.engine.figures import EngineStats


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
