"""How the rows of a request draw and end, from its validated body and the model's own defaults."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from mlx_parallm.config import GenerationConfig, LogprobsMode, ServerConfig
from mlx_parallm.core.engine import ModelCard
from mlx_parallm.core.requests import RepetitionLimits, SamplingParams, StopParams, WorkClass
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.generation_fields import GenerationBody
from mlx_parallm.server.api.sampling_fields import RepetitionDetection

SEED_SPACE = 2**64
NO_DEFAULTS: Mapping[str, float] = MappingProxyType({})


def used_defaults(card: ModelCard, config: ServerConfig) -> Mapping[str, float]:
    """The model's own values of sampling fields, unless the operator turned them off."""
    return card.generation_defaults if config.generation_config is GenerationConfig.AUTO else NO_DEFAULTS


def model_defaults(body: GenerationBody, card: ModelCard, config: ServerConfig) -> Mapping[str, float]:
    """The model's own values of fields that `body` may leave out; none for a trajectory, which is drawn from the
    model's distribution."""
    return used_defaults(card, config) if body.MODEL_DEFAULTS and not body.collect_trajectory else NO_DEFAULTS


def sampling_of(
    body: GenerationBody,
    defaults: Mapping[str, float],
    tokenizer: TextTokenizer,
    vocab_size: int,
    top_logprobs: int | None,
    mode: LogprobsMode,
) -> SamplingParams:
    """How the rows of a request draw their tokens.

    Args:
        defaults: see `model_defaults`.
        top_logprobs: number of alternatives to report for each generated token. None: no logprobs.

    Raises:
        InvalidRequestError: a token id is not in the vocabulary, or no token may be drawn.
    """

    def sent(name: str) -> float:
        value: float = getattr(body, name)
        return value if name in body.model_fields_set else defaults.get(name, value)

    _check_ids(body.logit_bias, vocab_size, "logit_bias")
    bad_words = _token_sequences(body.bad_words, tokenizer)
    greedy = sent("top_p") == 0
    return SamplingParams(
        temperature=0.0 if greedy else sent("temperature"),
        top_k=max(0, min(int(sent("top_k")), vocab_size)),
        top_p=1.0 if greedy else sent("top_p"),
        min_p=sent("min_p"),
        seed=secrets.randbits(64) if body.seed is None else body.seed % SEED_SPACE,
        presence_penalty=sent("presence_penalty"),
        frequency_penalty=sent("frequency_penalty"),
        repetition_penalty=sent("repetition_penalty"),
        logit_bias=tuple(sorted(body.logit_bias.items())),
        allowed_tokens=_allowed_tokens(body, bad_words, tokenizer.eos_token_ids, vocab_size),
        bad_words=bad_words,
        top_logprobs=top_logprobs,
        processed_logprobs=mode is LogprobsMode.PROCESSED,
    )


def stopping_of(
    body: GenerationBody, max_tokens: int, vocab_size: int, repetition: RepetitionLimits | None
) -> StopParams:
    """When the rows of a request end. Raises InvalidRequestError if a stop token is not in the vocabulary."""
    _check_ids(body.stop_token_ids, vocab_size, "stop_token_ids")
    return StopParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop=tuple(body.stop),
        ignore_eos=body.ignore_eos,
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop=body.include_stop_str_in_output,
        repetition=repetition,
    )


def repetition_of(body: GenerationBody, work_class: WorkClass, config: ServerConfig) -> RepetitionLimits | None:
    """How long the rows of a request may repeat themselves. None: without end, which is the default for what may become
    training data, and where the request wants a certain length."""
    asked = body.repetition_detection
    if isinstance(asked, RepetitionDetection):
        return asked.limits
    if asked is None:
        served = work_class is WorkClass.INFERENCE and body.MODEL_DEFAULTS and not body.collect_trajectory
        asked = config.stop_repetition and served and not body.ignore_eos
    return RepetitionLimits() if asked else None


def _check_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    if any(token_id >= vocab_size for token_id in ids):
        raise InvalidRequestError(f"Token ids must be below the vocabulary's size, {vocab_size}.", param=param)


def _token_sequences(words: Sequence[str], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, as it is at the beginning of a text and as it is after a space."""
    spellings = (spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip()))
    tokens = (tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
    return tuple(dict.fromkeys(ids for ids in tokens if ids))


def _allowed_tokens(
    body: GenerationBody, bad_words: Sequence[tuple[int, ...]], eos_ids: Collection[int], vocab_size: int
) -> bytes:
    """The bit mask of `allowed_token_ids`; empty if the request does not have it.

    Raises:
        InvalidRequestError: a token id is not in the vocabulary, or other fields forbid all allowed tokens.
    """
    if body.allowed_token_ids is None:
        return b""
    _check_ids(body.allowed_token_ids, vocab_size, "allowed_token_ids")
    ends = {*eos_ids, *body.stop_token_ids} if body.min_tokens else set()
    forbidden = ends.union(word[0] for word in bad_words if len(word) == 1)
    if forbidden.issuperset(body.allowed_token_ids):
        raise InvalidRequestError(
            "allowed_token_ids: min_tokens or bad_words forbid all of these tokens; allow another one.",
            param="allowed_token_ids",
        )
    mask = bytearray(-(-vocab_size // 8))
    for token_id in body.allowed_token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)
