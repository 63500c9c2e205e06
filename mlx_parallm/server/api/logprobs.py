"""Log probabilities in the three forms that clients know: OpenAI's for completions and for chat, and vLLM's
`prompt_logprobs`. All are in nats and of the raw model, before temperature and filters."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mlx_parallm.core.requests import TokenLogprob
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.server.api.fields import WireOutput

LOWEST = -9999.0
"""Sent for minus infinity, which JSON does not have. OpenAI and vLLM send the same."""


class CompletionLogprobs(WireOutput):
    """Five lists of equal length, with one entry for each token."""

    LONG: ClassVar[bool] = True

    tokens: list[str]
    """The texts of the tokens, or `token_id:<id>`."""
    token_logprobs: list[float | None]
    """Log probabilities in nats, of the raw model; null for the first token of a prompt, which has no context."""
    top_logprobs: list[dict[str, float] | None]
    """For each token, the logprobs in nats of the most likely tokens and of the token itself, by their texts."""
    text_offset: list[int]
    """Number of characters before the token."""
    token_ids: list[int]
    """The ids of the tokens, which a client cannot always tell from their texts."""


class ChatTopLogprob(WireOutput):
    """One candidate for a token."""

    token: str
    """Its text, or `token_id:<id>`."""
    logprob: float
    """Log probability in nats, of the raw model."""
    bytes: list[int]
    """Its exact bytes, which may be part of a character."""


class ChatTokenLogprob(ChatTopLogprob):
    """A sampled token."""

    top_logprobs: list[ChatTopLogprob]
    """The most likely tokens at its position."""


class ChatLogprobs(WireOutput):
    """Logprobs of all sampled tokens, including those of reasoning and tool calls."""

    LONG: ClassVar[bool] = True

    content: list[ChatTokenLogprob]
    """One entry for each token, in order."""


class PromptLogprob(WireOutput):
    """One candidate for a token of the prompt, in vLLM's form."""

    logprob: float
    """Log probability in nats, of the raw model."""
    rank: int
    """1 for the most likely token."""
    decoded_token: str
    """The token's text."""


PromptLogprobs = list[dict[str, PromptLogprob] | None]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token and its logprobs, which are None for the first token of a prompt."""

    token_id: int
    logprob: TokenLogprob | None


def scored_prompt(prompt: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> tuple[ScoredToken, ...]:
    """The tokens of a prompt with their logprobs; both have the same length."""
    return tuple(ScoredToken(token_id, logprob) for token_id, logprob in zip(prompt, logprobs, strict=True))


def finite(logprob: float) -> float:
    """The logprob, at least `LOWEST`. NaN, which no model should give, becomes `LOWEST` too."""
    return max(LOWEST, logprob)


def token_text(tokenizer: TextTokenizer, token_id: int, as_id: bool = False) -> str:
    """The text of one token alone, with U+FFFD for a part of a character. `as_id` gives vLLM's `token_id:<id>`."""
    return f"token_id:{token_id}" if as_id else tokenizer.token_bytes(token_id).decode("utf-8", "replace")


class CompletionLogprobsWriter:
    """Writes the logprobs of one choice of `/v1/completions`, piece by piece.

    The offset of a token is the number of complete characters before it in the choice, so a token that begins inside a
    character has the offset of that character. With `as_ids`, tokens are written as `token_id:<id>`.
    """

    def __init__(self, tokenizer: TextTokenizer, top: int, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._as_ids = as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def write(self, scored: Sequence[ScoredToken]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[self._text(token.token_id) for token in scored],
            token_logprobs=[finite(token.logprob.logprob) if token.logprob else None for token in scored],
            top_logprobs=[self._top_logprobs(token.logprob) if token.logprob else None for token in scored],
            text_offset=[self._advance(token.token_id) for token in scored],
            token_ids=[token.token_id for token in scored],
        )

    def _top_logprobs(self, logprob: TokenLogprob) -> dict[str, float]:
        """The most likely tokens and the sampled one. Of two tokens with equal texts, the more likely one is kept."""
        best: dict[str, float] = {}
        for token_id, value in (*logprob.top[: self._top], (logprob.token_id, logprob.logprob)):
            best.setdefault(self._text(token_id), finite(value))
        return best

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer, token_id, self._as_ids)

    def _advance(self, token_id: int) -> int:
        """The token's offset."""
        offset = self._characters
        self._characters += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset


def chat_logprobs(
    tokenizer: TextTokenizer, scored: Iterable[ScoredToken], top: int, as_ids: bool = False
) -> ChatLogprobs:
    """OpenAI's form for chat, with the `top` most likely tokens of each position. With `as_ids`, texts are ids."""

    def fields(token_id: int, value: float) -> dict[str, object]:
        text, exact = token_text(tokenizer, token_id, as_ids), tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": finite(value), "bytes": list(exact)}

    def entry(sampled: TokenLogprob) -> ChatTokenLogprob:
        best = [ChatTopLogprob.model_validate(fields(*candidate)) for candidate in sampled.top[:top]]
        return ChatTokenLogprob.model_validate({**fields(sampled.token_id, sampled.logprob), "top_logprobs": best})

    return ChatLogprobs(content=[entry(token.logprob) for token in scored if token.logprob])


def prompt_logprobs(tokenizer: TextTokenizer, scored: Iterable[ScoredToken], top: int) -> PromptLogprobs:
    """vLLM's form: candidates by token id for each position of the prompt, with the prompt's own token first."""
    return [_candidates(tokenizer, token.logprob, top) if token.logprob else None for token in scored]


def _candidates(tokenizer: TextTokenizer, actual: TokenLogprob, top: int) -> dict[str, PromptLogprob]:
    assert actual.rank is not None

    def entry(token_id: int, value: float, rank: int) -> PromptLogprob:
        return PromptLogprob(logprob=finite(value), rank=rank, decoded_token=token_text(tokenizer, token_id))

    best = actual.top[:top]
    ranks: dict[float, int] = {}
    for place, (_, value) in enumerate(best, start=1):
        ranks.setdefault(value, place)  # tokens that tie have the same rank
    candidates = {str(actual.token_id): entry(actual.token_id, actual.logprob, actual.rank)}
    for token_id, value in best:
        candidates.setdefault(str(token_id), entry(token_id, value, ranks[value]))
    return candidates
