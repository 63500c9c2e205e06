"""How many candidates a request may have at each token: the fields `logprobs`, `top_logprobs` and `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.core.candidates import TOP_LOGPROBS
from mlx_parallm.errors import InvalidRequestError

MAX_CANDIDATES = 2**18
"""Largest number of candidates of one answer, where there are more than `TOP_LOGPROBS` at each token. An answer in chat
with so many takes some 250 MB of memory while it is written, because each candidate is an object until then."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a request asks for: the field that says so, and its number. None: no logprobs."""

    param: str
    number: int | None = None

    def resolved(self, vocab_size: int, limit: int) -> int | None:
        """The number for this vocabulary. `limit`: the operator's, `--max-logprobs`.

        Raises:
            InvalidRequestError: it is over the limit.
        """
        if self.number is None:
            return None
        if self.number <= limit:
            return min(self.number, vocab_size)
        raise InvalidRequestError(
            f"{self.param}: at most {limit} on this server, whose operator can change it with --max-logprobs.",
            param=self.param,
        )


def widest(asked: Sequence[Candidates]) -> Candidates:
    """The one with the largest number."""
    return max(asked, key=lambda each: -1 if each.number is None else each.number)


def check_amount(param: str, number: int | None, tokens: int, shorter: str) -> None:
    """Raises InvalidRequestError if so many candidates for each of these tokens are too many for one answer. `shorter`:
    what else a client can do than ask for fewer candidates."""
    if number is not None and number > TOP_LOGPROBS and tokens > 1 and number * tokens > MAX_CANDIDATES:
        raise InvalidRequestError(
            f"{param}: {number} candidates for each of {tokens} tokens are more than {MAX_CANDIDATES} in all; ask for "
            f"fewer, or {shorter}.",
            param=param,
        )
