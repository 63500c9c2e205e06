"""The shared nouns. A leaf: imports nothing of ours, no MLX, no HTTP.

Everything here is frozen and crosses room walls freely: the HTTP face builds a `GenerationRequest`,
the engine answers it with a stream of events, and neither knows how the other works.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One immutable version of one adapter. Version 0 of `base` is the model itself."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


BASE_ADAPTER = AdapterRef("base", 0)


class WorkClass(StrEnum):
    """Who a sequence works for; rows are shared between the two (`priority_ratios`)."""

    INFERENCE = "inference"
    TRAINING = "training"


class FinishReason(StrEnum):
    """Why a sequence ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one row draws its tokens. Neutral values switch a stage off.

    Stages apply in vLLM's order: penalties, logit_bias, temperature, top_k, top_p, min_p.
    `temperature` 0 is greedy (argmax after penalties and bias). `seed` keys a counter-based
    generator, so equal seeds give equal tokens whatever the neighbours.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    """None: no logprobs. k >= 0: the drawn token's logprob and the k best of the raw model."""


@dataclass(frozen=True, slots=True)
class StopParams:
    """When one row ends. `max_tokens` counts generated tokens and may be 0 (score the prompt)."""

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`n` sequences for each prompt; choice index = prompt index * n + sample index.

    `prompt_logprobs` None: not wanted; k >= 0: each prompt token's logprob and the k best.
    `priority`: lower runs earlier (vLLM's meaning), 0 by default.
    Sample j of a prompt draws with seed `sampling.seed + j`.
    """

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    stopping: StopParams
    n: int = 1
    prompt_logprobs: int | None = None
    adapter: AdapterRef = BASE_ADAPTER
    work_class: WorkClass = WorkClass.INFERENCE
    priority: int = 0

    @property
    def sequences(self) -> int:
        """Rows this request asks for."""
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw-model logprob (fp32, nats) of one token, and the best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# ---- events: what a request's output queue carries ---------------------------------------------


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Logprobs of prompt `prompt_index`, one entry per prompt token; the first is None (no context)."""

    prompt_index: int
    logprobs: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step adds to choice `index`.

    `text` may be empty while a UTF-8 character or a possible stop string is incomplete; the texts
    of a sequence, joined, are its final text. `logprobs` aligns with `token_ids` when asked for,
    else it is empty. `finish_reason` is set on the sequence's last output and only there.
    `stop_reason` is the matched stop string, when there was one.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """Terminal: every sequence has ended. Times are seconds on `time.monotonic`'s clock."""

    prompt_tokens: int
    completion_tokens: int
    arrived_at: float
    admitted_at: float
    first_token_at: float
    finished_at: float
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Terminal: the engine gave up on the request. `error` is a member of our exception tree."""

    error: Exception


Event = PromptScored | SequenceOutput | RequestFinished | RequestFailed


# ---- what the rooms see of each other ----------------------------------------------------------


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

    `kv_bytes_*` are of the pool's budget; `detail` is JSON for `/debug/state`.
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
    detail: Mapping[str, Any] = field(default_factory=dict)


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


class TextTokenizer(Protocol):
    """Text to token ids and back. Safe to call from any thread."""

    vocab_size: int
    eos_token: str | None
    bos_token: str | None
    eos_token_ids: frozenset[int]
    chat_template: str | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for (part of a UTF-8 character, perhaps)."""
        ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Renders the model's own template in a sandbox and encodes it.

        Raises:
            InvalidRequestError: the model has no template, or the template refuses the messages.
        """
        ...
