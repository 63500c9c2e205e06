"""Generation requests, and the events that answer them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.candidates import Candidate
from mlx_parallm.core.grammar import Grammar


class WorkClass(StrEnum):
    """What a sequence is for. The two classes share the rows of the batch by `priority_ratios`."""

    INFERENCE = "inference"
    """A live request: someone waits for the answer."""
    TRAINING = "training"
    """A rollout: the answer becomes training data."""


class FinishReason(StrEnum):
    """Why a sequence ended. The values are OpenAI's, and vLLM's for the last one."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    """It repeated itself without end; see `RepetitionLimits`."""

    @property
    def cut_off(self) -> bool:
        """Whether the model did not end the sequence itself."""
        return self is not FinishReason.STOP


class Pooling(StrEnum):
    """How one vector is made of a sequence's hidden states after the model's last norm."""

    LAST = "last"
    """That of the last token, the only one that depends on all tokens."""
    MEAN = "mean"
    """The mean over all tokens."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one row samples its tokens. The default value of a parameter turns its stage off.

    The stages run in vLLM's order: penalties, logit_bias, temperature, top_k, top_p, min_p. `temperature` 0 is greedy
    (argmax after penalties and bias). `seed` is the key of a counter-based generator, so equal seeds give equal tokens
    in any batch.

    `allowed_tokens` is a bit mask of the tokens that may be sampled: bit `id % 8` of byte `id // 8`; empty means all.
    `bad_words` are token sequences that are not written: after the beginning of one, its last token is not sampled.
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
    allowed_tokens: bytes = b""
    bad_words: tuple[tuple[int, ...], ...] = ()
    top_logprobs: int | None = None
    """None: no logprobs. k >= 0: logprobs of the sampled token and of the k best tokens."""
    processed_logprobs: bool = False
    """Whether these are logprobs of the distribution that samples the tokens, and not of the raw model. Greedy rows
    have those of the model after penalties and bias, at temperature 1."""


@dataclass(frozen=True, slots=True)
class RepetitionLimits:
    """How long a sequence may repeat itself: it ends when its last tokens are a period of `min_period` to `max_period`
    tokens, `min_count` times or more, and `min_tokens` in all.

    A period of a few different tokens is often meant, as in a matrix of zeros. It may go on for `min_tokens_of_few`.
    """

    max_period: int = 512
    min_period: int = 1
    min_count: int = 8
    min_tokens: int = 1024
    min_tokens_of_few: int = 4096


@dataclass(frozen=True, slots=True)
class StopParams:
    """When one row ends. `max_tokens` counts generated tokens; 0 only scores the prompt. A token of `stop_token_ids`
    ends the text and adds nothing to it, also with `ignore_eos`. With `include_stop`, the text has the stop string or
    the token that ended it. `repetition`: None if a row may repeat itself.

    `fallbacks` are the failure tables of the search for stop strings (Knuth, Morris and Pratt, 1977), computed here to
    save time on the device thread. When character `k` of `stop[i]` does not match, the search continues at character
    `fallbacks[i][k]`, or with the text's next character if that is -1.
    """

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    repetition: RepetitionLimits | None = None
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


class Signal(StrEnum):
    """What a group teaches, and so the loss of its updates.

    REWARDS: its rewards, with the loss that is configured. LATE_FEEDBACK: opinions on an answer that had been dropped,
    with kto. PREFERENCES: a chosen answer and a rejected one, with dpo. CORRECTIONS: an answer to imitate, with
    cross_entropy. The losses of the last three need no answers of the newest version.

    To add one, see the recipe in docs/contributing.md.
    """

    REWARDS = "rewards"
    LATE_FEEDBACK = "late_feedback"
    PREFERENCES = "preferences"
    CORRECTIONS = "corrections"

    @property
    def is_edit(self) -> bool:
        """Whether people have written answers for it, which have no rewards of their own."""
        return self in (Signal.PREFERENCES, Signal.CORRECTIONS)

    @property
    def has_rewards(self) -> bool:
        """Whether its loss reads rewards. What imitates answers reads none."""
        return self is not Signal.CORRECTIONS

    @property
    def answers(self) -> int:
        """The answers of one group, if people have made it."""
        return 2 if self is Signal.PREFERENCES else 1


@dataclass(frozen=True, slots=True)
class CollectionSpec:
    """Marks a request as training data. Without `group_id` and `episode_id`, the `n` sequences of each prompt become
    one group of trajectories, whose rewards are compared with each other.

    Attributes:
        scorer: the scoring function, which computes the rewards and reads `metadata`. None: clients send the rewards as
            feedback, and one is enough for a group that came with one request. Edits have the name of their signal
            here, so that each of their answers needs a reward; no scorer is asked for them.
        client: the client's address; the trajectories of different clients are scored in turns.
        unscored: why the scorer that the request named does not reward it, so that it waits for feedback; else empty.
        messages: the conversation that the prompt was rendered from, as chat templates take it. Empty if the prompt is
            not a conversation.
        prompt_text: the prompt, if the request or the task gave it as a text; else empty.
        group_id: the answers of all requests with the same one are one group. Empty: the request is its own group.
        group_size: how many members the group of `group_id` has; None: it ends when it is closed.
        episode_id: the requests with the same one are the turns of one episode, which is one member of its group.
            Empty: each answer is a member.
        turn: the request's place in its episode, from 0; None: the turns are in order of their arrival.
        unmatched: why the prompt does not continue the tokens of an earlier turn of its episode; empty if it does, and
            for the first turn.
        signal: what its trajectories teach.
    """

    scorer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    client: str = field(default="", compare=False)
    unscored: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    prompt_text: str = field(default="", compare=False)
    group_id: str = ""
    group_size: int | None = None
    episode_id: str = ""
    turn: int | None = None
    unmatched: str = ""
    signal: Signal = Signal.REWARDS


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for `n` sequences of each prompt. Choice index = prompt index * n + sample index.

    Attributes:
        sampling: sample j of a prompt uses the seed `sampling.seed + j`.
        prompt_logprobs: None: not wanted. k >= 0: logprobs of each prompt token and of the k best tokens.
        scored_from: the first token of each prompt whose logprobs are wanted. The tokens before it get none, and may
            come from the prefix cache.
        priority: requests with a lower value run earlier, as in vLLM.
        collection: None: nothing of the request is kept for training.
        grammar: each sequence's text must follow it. A sequence ends when the grammar allows no further token.
        visible_specials: ids of special tokens that appear in the text. Other special tokens add no text.
        cache_salt: the prefix cache gives a request only what requests with an equal salt computed.
        pooling: each prompt gets one vector of its hidden states, and no token is sampled. None: tokens are sampled.
        key: the name of the API key that sent it. The scheduler is fair between keys.
        base: the name of the base model, which must be loaded. Empty: the first one.
        whole: nobody reads an event before the last one, so the request may begin anew on another node meanwhile.
    """

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    stopping: StopParams
    n: int = 1
    prompt_logprobs: int | None = None
    scored_from: int = 0
    adapter: AdapterRef = BASE_ADAPTER
    work_class: WorkClass = WorkClass.INFERENCE
    priority: int = 0
    collection: CollectionSpec | None = None
    grammar: Grammar | None = None
    visible_specials: frozenset[int] = frozenset()
    cache_salt: str = field(default="", repr=False)
    pooling: Pooling | None = None
    key: str = ""
    base: str = ""
    whole: bool = False

    @property
    def sequences(self) -> int:
        """The number of sequences, over all prompts."""
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The logprob (fp32, nats) of one token, and the best alternatives, best first: of the raw model, or for generated
    tokens as `SamplingParams.processed_logprobs` says.

    `rank` is 1 for the most likely token. It is computed for prompt tokens only.
    """

    token_id: int
    logprob: float
    top: Sequence[Candidate] = ()
    rank: int | None = None


# ---- events of one request ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """The first forward unit with a row of the request was launched. Times are as in `RequestFinished`."""

    arrived_at: float
    started_at: float


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Logprobs of the tokens of prompt `prompt_index`. The first is None, because it has no context."""

    prompt_index: int
    logprobs: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one forward unit adds to choice `index`.

    Attributes:
        text: empty while a UTF-8 character or a possible stop string is incomplete. The final text is all texts joined.
        logprobs: one for each of `token_ids` if requested, else empty.
        finish_reason: set on the sequence's last output only.
        stop_reason: the stop string that matched, or the token of `stop_token_ids` that was sampled, if one was.
        sampling_logprobs: if the request is collected, the logprob (fp32, nats) of each of `token_ids` under the
            distribution that sampled it; else empty.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    sampling_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SequencePooled:
    """The pooled hidden states of choice `index`, which has ended: little-endian float32 [hidden], not normalised."""

    index: int
    vector: bytes


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """Terminal: every sequence has ended. Times are seconds on `time.monotonic`'s clock.

    Attributes:
        started_at: when the first forward unit with a row of the request was launched, which ends its time in the
            queue.
        cached_tokens: tokens of the prompts whose keys and values were taken from the prefix cache and not computed,
            over all prompts of the request. Each prompt counts once, whatever `n` is.
        trajectory_ids: ids of a collected request's trajectories, in the order of its choices.
        trajectory_warning: why the trajectories will not be trained on, or empty.
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
    """Terminal: the request failed. `error` belongs to the exception tree in `mlx_parallm.errors`."""

    error: Exception


Event = RequestStarted | PromptScored | SequenceOutput | SequencePooled | RequestFinished | RequestFailed
