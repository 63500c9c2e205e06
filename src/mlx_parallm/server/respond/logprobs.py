"""Logprobs in the three forms the wire knows: legacy completions, chat, and vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from mlx_parallm.core import TextTokenizer, TokenLogprob
from mlx_parallm.server.respond.pieces import ScoredToken
from mlx_parallm.server.wire.chat import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from mlx_parallm.server.wire.common import PromptLogprob, PromptLogprobs
from mlx_parallm.server.wire.completions import CompletionLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say (OpenAI and vLLM send the same)."""


def finite(logprob: float) -> float:
    """The logprob as JSON can carry it; NaN, which no model should give, is the lowest too."""
    return max(LOWEST, logprob)


def token_text(tokenizer: TextTokenizer, token_id: int, as_id: bool = False) -> str:
    """One token alone, with U+FFFD for a part of a character; `as_id`: vLLM's `token_id:<id>`."""
    return f"token_id:{token_id}" if as_id else tokenizer.token_bytes(token_id).decode("utf-8", "replace")


class LegacyLogprobs:
    """Writes one choice's logprobs for `/v1/completions`, piece by piece.

    Offsets count the characters that the choice's tokens had spelled before each of them, so a token
    that ends a character starts where the character does. `as_ids`: tokens are written as `token_id:<id>`.
    """

    def __init__(self, tokenizer: TextTokenizer, top: int, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._as_ids = as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def write(self, scored: Sequence[ScoredToken]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[self._name(token.token_id) for token in scored],
            token_logprobs=[finite(token.logprob.logprob) if token.logprob else None for token in scored],
            top_logprobs=[self._best(token.logprob) if token.logprob else None for token in scored],
            text_offset=[self._advance(token.token_id) for token in scored],
        )

    def _best(self, logprob: TokenLogprob) -> dict[str, float]:
        """The best and the drawn one. Where two tokens have the same text, the better one keeps it."""
        best: dict[str, float] = {}
        for token_id, value in (*logprob.top[: self._top], (logprob.token_id, logprob.logprob)):
            best.setdefault(self._name(token_id), finite(value))
        return best

    def _name(self, token_id: int) -> str:
        return token_text(self._tokenizer, token_id, self._as_ids)

    def _advance(self, token_id: int) -> int:
        offset = self._characters
        self._characters += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset


def chat_logprobs(
    tokenizer: TextTokenizer, scored: Iterable[ScoredToken], top: int, as_ids: bool = False
) -> ChatLogprobs:
    """Chat's form: exact bytes beside the text of each token. `as_ids`: the text is `token_id:<id>`."""

    def fields(token_id: int, value: float) -> dict[str, object]:
        text, spelled = token_text(tokenizer, token_id, as_ids), tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": finite(value), "bytes": list(spelled)}

    def entry(drawn: TokenLogprob) -> ChatTokenLogprob:
        best = [ChatTopLogprob.model_validate(fields(*candidate)) for candidate in drawn.top[:top]]
        return ChatTokenLogprob.model_validate({**fields(drawn.token_id, drawn.logprob), "top_logprobs": best})

    return ChatLogprobs(content=[entry(token.logprob) for token in scored if token.logprob])


def prompt_logprobs(tokenizer: TextTokenizer, scored: Iterable[ScoredToken], top: int) -> PromptLogprobs:
    """vLLM's form: for each prompt token the candidates by token id, the prompt's own first."""
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
