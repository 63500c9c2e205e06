"""What a request is, and the events that answer it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.grammar import Grammar


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
    """When one row ends. `max_tokens` counts generated tokens and may be 0 (score the prompt).

    `fallbacks[i][k]`: where the search for `stop[i]` goes on when its character `k` is not the next one of the text:
    with the character of that number, or, for -1, behind the text's character (Knuth, Morris and Pratt 1977, whose
    chains of fallbacks are logarithmic in the pattern's length). Computed here, so that the device thread need not.
    """

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    fallbacks: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fallbacks", tuple(map(_fallbacks, self.stop)))


def _fallbacks(stop: str) -> tuple[int, ...]:
    fallbacks, border = [-1] * len(stop), 0
    for place in range(1, len(stop)):
        fallbacks[place] = fallbacks[border] if stop[place] == stop[border] else border
        while border >= 0 and stop[place] != stop[border]:
            border = fallbacks[border]
        border += 1
    return tuple(fallbacks)


@dataclass(frozen=True, slots=True)
class Collection:
    """Marks a request: the `n` sequences of each of its prompts become one group of trajectories.

    `scorer` names who gives the rewards; None: they come by feedback. `metadata` is what the scorer reads. `client`:
    who asked, an address: clients take turns at being scored.
    """

    scorer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    client: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`n` sequences for each prompt; choice index = prompt index * n + sample index.

    `prompt_logprobs` None: not wanted; k >= 0: each prompt token's logprob and the k best.
    `priority`: lower runs earlier (vLLM's meaning), 0 by default.
    Sample j of a prompt draws with seed `sampling.seed + j`. `collection` None: nothing of it is kept for training.
    `grammar`: what each of its texts follows; they end where nothing can follow.
    `spelled`: special tokens that are text here; others add nothing to it.
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
    collection: Collection | None = None
    grammar: Grammar | None = None
    spelled: frozenset[int] = frozenset()

    @property
    def sequences(self) -> int:
        """Rows this request asks for."""
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw-model logprob (fp32, nats) of one token, and the best alternatives, best first.

    `rank`: one more than the number of tokens that are more likely; computed for prompt tokens alone.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


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
    else it is empty; so does `sampling_logprobs` (fp32 nats, of the distribution that drew the token) when the
    request is collected. `finish_reason` is set on the sequence's last output and only there.
    `stop_reason` is the matched stop string, when there was one.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    sampling_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """Terminal: every sequence has ended. Times are seconds on `time.monotonic`'s clock.

    `started_at`: when the device began its first unit of work for the request, which ends its time in the queue; that
    is a chunk of its prompt, or a decode step where a prompt has one token.
    `trajectory_ids`: of a collected request's sequences, in order of choice. `trajectory_warning`: why they will not
    be trained on, or "".
    """

    prompt_tokens: int
    completion_tokens: int
    arrived_at: float
    started_at: float
    first_token_at: float
    finished_at: float
    cached_tokens: int = 0
    trajectory_ids: tuple[str, ...] = ()
    trajectory_warning: str = ""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Terminal: the engine gave up on the request. `error` is a member of our exception tree."""

    error: Exception


Event = PromptScored | SequenceOutput | RequestFinished | RequestFailed
