"""What the rooms see of each other: cards, snapshots, and the protocols of engine, adapters and tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from mlx_parallm.core.adapters import AdapterCard, AdapterRef, AdapterStats, CheckpointCard
from mlx_parallm.core.markup import Reasoning, ToolFormat
from mlx_parallm.core.requests import Event, GenerationRequest
from mlx_parallm.core.schedule import DECODE_GAPS, TRAINING_SHARES, DeviceSchedule, Histogram, PauseMode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the HTTP face says of the base model."""

    name: str
    context_length: int
    vocab_size: int
    quantization: str
    dtype: str
    parameters: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot, taken without stopping the engine. Counters only grow.

    `kv_bytes_*` are of the pool's budget; `detail` is JSON for `/debug/state`. `training_share`: of device time in the
    last window, whatever else there was to do. `paused`: since `pause`, whatever is still under way.
    """

    alive: bool
    ready: bool
    running: int = 0
    waiting: int = 0
    kv_bytes_held: int = 0
    kv_bytes_budget: int = 0
    kv_tokens_used: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    aborted_total: int = 0
    failed_steps_total: int = 0
    schedule: DeviceSchedule = field(default_factory=DeviceSchedule)
    decode_gaps: Histogram = DECODE_GAPS
    training_shares: Histogram = TRAINING_SHARES
    training_share: float = 0.0
    paused: bool = False
    detail: Mapping[str, Any] = field(default_factory=dict)


class DeviceWork(Protocol):
    """Work of the device thread beside requests, in units short enough to stand between two decode steps."""

    def waits(self) -> bool:
        """Whether `advance` has a unit to run. Cheap, and touches no device."""
        ...

    def advance(self) -> None:
        """Runs one unit. No step is in flight.

        Raises:
            Exception: whatever the device raised; `reset` is called then. After failed staging, whose arrays rows
                read, all rows are taken off the device before it, and recomputed after.
        """
        ...

    def reset(self) -> None:
        """Gives up the unit that failed, and whatever it may have left half done on the device."""
        ...

    @property
    def bytes_held(self) -> int:
        """What it has taken of the device's memory, and is about to take for its next unit; touches no device."""
        ...


class TrainingWork(DeviceWork, Protocol):
    """Updates of adapters."""

    def pace(self, seconds: float) -> None:
        """The next unit takes no longer than this, as far as the work can be cut."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The most that the device's memory has held since start, whatever for: measuring units resets MLX's own."""
        ...


class DeviceThread(Protocol):
    """The one thread that owns MLX, seen from the event loop."""

    async def on_device(self, start: Callable[[Callable[[T], None]], None]) -> T:
        """Runs `start(tell)` on the device thread between two units, and waits for what it tells, then or later.

        `start` may use MLX, but must not write what rows read.

        Raises:
            Exception: whatever `start` raises; it costs nobody else anything.
            EngineDeadError: the device thread has stopped.
        """
        ...


class EngineClient(Protocol):
    """The asyncio face of the engine. Used on the event loop's thread only."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Yields events, the last of them terminal. Closing the iterator (`aclose`, or
        cancelling the task that reads it) aborts the request and frees its rows.

        Raises:
            EngineDeadError: the device thread is not running.
        """
        ...

    def stats(self) -> EngineStats:
        """Counters and gauges now; never waits for the device."""
        ...

    async def reschedule(self, schedule: DeviceSchedule) -> None:
        """Shares the device like this from the next unit on. When it returns, `stats` shows it.

        Raises:
            EngineDeadError: the device thread is not running.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Requests that come from now on wait for `resume`; those under way go by the mode. Returns when that has
        happened, or when a later `pause` or `resume` has taken its place. Training and staging go on.

        Raises:
            EngineDeadError: the device thread is not running.
        """
        ...

    async def resume(self) -> None:
        """Ends a pause; without one it changes nothing.

        Raises:
            EngineDeadError: the device thread is not running.
        """
        ...

    async def sleep(self, bank: bool = False) -> None:
        """Gives back what only sampling holds: KV pool and cached buffers, once the requests under way have ended;
        with `bank` the adapters' slots too, versions that are in no file kept as copies. The next request takes them
        again; whoever wants sleep keeps requests away.

        Raises:
            EngineDeadError: the device thread is not running.
        """
        ...


class AdapterClient(Protocol):
    """The asyncio face of the adapters. Used on the event loop's thread only.

    A *selector* names a version: `name` (its live version), `name@version`, or a checkpoint of the default
    adapter: `checkpoint-<step>`, a tag, or `latest`. `base` is the model itself.
    """

    def lease(self, selector: str | None) -> AbstractContextManager[AdapterRef]:
        """The version that `selector` means now (None: what the route gives to requests that name no adapter).
        While the block runs the version cannot be forgotten, whatever is published or unloaded meanwhile.

        Raises:
            UnknownModelError: nothing has that name.
        """
        ...

    def find(self, selector: str) -> AdapterCard:
        """Raises UnknownModelError: no adapter has that name (`base` is none)."""
        ...

    def cards(self) -> tuple[AdapterCard, ...]:
        """Every version that can be asked for, by name and version."""
        ...

    async def load(self, name: str, path: str, replace: bool) -> AdapterCard:
        """Reads, checks, stages and flips: when it returns, `name` means what is at `path`.

        Content that `name` already means makes no new version.

        Raises:
            InvalidRequestError: the name is not plain, or taken and `replace` is false; the path is outside the
                allowed roots; the files are not an adapter that this model takes.
        """
        ...

    async def unload(self, selector: str) -> tuple[AdapterRef, ...]:
        """Forgets every version of a name, or one version. Rows in flight end undisturbed.

        Raises:
            UnknownModelError: nothing has that name.
            ConflictError: the version is the live one of its name, or a route leads to it.
        """
        ...

    def route(self) -> Mapping[str, float]:
        """Where requests that name no adapter go: selector → share, adding up to 1."""
        ...

    async def set_route(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """Sends requests that name no adapter to these selectors, in proportion; stages them first.

        Raises:
            UnknownModelError: a selector means nothing.
            InvalidRequestError: no weight is above 0.
        """
        ...

    async def rollback(self, name: str | None) -> tuple[AdapterRef, Mapping[str, float]]:
        """Makes `name` mean the version it meant before; None takes back the last `set_route`.

        Returns:
            The version that is live now (the route's heaviest for None), and the route.

        Raises:
            UnknownModelError: nothing has that name.
            ConflictError: there is nothing to go back to.
        """
        ...

    def checkpoints(self) -> tuple[CheckpointCard, ...]:
        """Those on disk, oldest first; empty without a checkpoint folder."""
        ...

    async def save_checkpoint(
        self, selector: str | None, step: int | None, tags: Sequence[str], metrics: Mapping[str, float]
    ) -> CheckpointCard:
        """Writes a version (None: the default adapter's live one) as checkpoint `step` (None: the next one).

        Raises:
            UnknownModelError: nothing has that name.
            InvalidRequestError: no checkpoint folder is configured, or a tag is not a plain name.
            ConflictError: there is a checkpoint of that step with other content.
        """
        ...

    def stats(self) -> AdapterStats:
        """Counters and gauges now; never waits for the device."""
        ...


class TextTokenizer(Protocol):
    """Text to token ids and back. Safe to call from any thread."""

    vocab_size: int
    eos_token: str | None
    bos_token: str | None
    eos_token_ids: frozenset[int]
    special_ids: frozenset[int]
    """Tokens that are no text, those of the end among them."""
    chat_template: str | None
    tool_format: ToolFormat
    reasoning: Reasoning | None
    """None: the model does not mark what it thinks."""

    def encode(self, text: str, add_special_tokens: bool = True, at_most: int | None = None) -> list[int]:
        """Raises ContextLengthError: the text is so long that it must have more than `at_most` tokens."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for (part of a UTF-8 character, perhaps)."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        at_most: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Renders the model's own template in a sandbox and encodes it.

        Raises:
            InvalidRequestError: the model has no template, or the template refuses the messages.
            ContextLengthError: the rendered text must have more than `at_most` tokens.
        """
        ...
