"""A `Piece` is any part of one choice: what a step added, an echoed prompt, or all of them joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_parallm.core import FinishReason, SequenceOutput, TokenLogprob
from mlx_parallm.server.respond.parts import Part


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token and its logprobs; None for a first prompt token, which has no context."""

    token_id: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of choice `index`. `token_ids` are generated ones; `scored` may hold an echoed prompt's too. `parts`: what a
    chat reads in the texts so far, which may be less than `text`, or more."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    scored: tuple[ScoredToken, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    parts: tuple[Part, ...] = ()


def cut_off(last: Piece | SequenceOutput) -> bool:
    """Whether something else than the model ended the text."""
    return last.finish_reason is FinishReason.LENGTH or last.stop_reason is not None


def of_output(output: SequenceOutput) -> Piece:
    scored = tuple(ScoredToken(logprob.token_id, logprob) for logprob in output.logprobs)
    return Piece(output.index, output.text, output.token_ids, scored, output.finish_reason, output.stop_reason)


def score(prompt: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> tuple[ScoredToken, ...]:
    return tuple(ScoredToken(token_id, logprob) for token_id, logprob in zip(prompt, logprobs, strict=True))


def joined(choices: int, pieces: Iterable[Piece]) -> list[Piece]:
    """The whole of each choice; its last piece says why it ended."""
    own: list[list[Piece]] = [[] for _ in range(choices)]
    for piece in pieces:
        own[piece.index].append(piece)
    return [_whole(index, mine) for index, mine in enumerate(own)]


def _whole(index: int, mine: Sequence[Piece]) -> Piece:
    return Piece(
        index,
        text="".join(piece.text for piece in mine),
        token_ids=tuple(token for piece in mine for token in piece.token_ids),
        scored=tuple(token for piece in mine for token in piece.scored),
        finish_reason=mine[-1].finish_reason,
        stop_reason=mine[-1].stop_reason,
        parts=tuple(part for piece in mine for part in piece.parts),
    )
