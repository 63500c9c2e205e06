"""Prompts of later turns, which continue the tokens of an earlier turn exactly.

    earlier turn   its prompt ──────────────── sampled
    this turn      the same messages ───────── the answer ──── new messages ──── beginning of the answer
    its prompt     the earlier turn's tokens ─────── closer ── tokens of what is new

Encoding the answer's text again could give other tokens than those that were sampled, and then the two turns could not
be one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import takewhile
from typing import Any

ANSWERS = tuple({"role": "assistant", "content": content} for content in ("a", "b"))
"""Two answers that differ. What a template writes in the same way after both follows any answer."""


class Closers:
    """The tokens that chat templates write after an answer, which are found by rendering a conversation twice. They are
    the same for all conversations with one `key`: its template, its variables and the role of the message before the
    answer."""

    MOST = 256

    def __init__(self) -> None:
        self._known: dict[Hashable, list[int]] = {}

    def find(self, key: Hashable, render: Callable[[Mapping[str, Any]], Sequence[int]]) -> list[int]:
        """`render`: the token ids of a conversation that ends with this answer, without a generation prompt."""
        if key not in self._known:
            if len(self._known) >= self.MOST:
                self._known.clear()
            self._known[key] = closer_of(*map(render, ANSWERS))
        return self._known[key]


def closer_of(after_one: Sequence[int], after_other: Sequence[int]) -> list[int]:
    """The tokens that the chat template writes after the text of an answer.

    Args:
        after_one, after_other: the token ids of the same conversation with each of ANSWERS, without a generation
            prompt.
    """
    pairs = zip(reversed(after_one), reversed(after_other), strict=False)
    common = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return common[::-1]


def continued(
    tokens: Sequence[int], drawn: int, history: Sequence[int], closer: list[int], rendered: Sequence[int]
) -> list[int] | None:
    """The prompt of a turn that continues an earlier one.

    Args:
        tokens: of the earlier turn, its prompt and its answer, as they were sampled.
        drawn: how many of them are the answer's.
        history: what the chat template makes of the messages up to the answer, without a generation prompt.
        rendered: what it makes of all messages.

    Returns:
        `tokens`, and those of what follows the answer. None: the template writes the history differently now, so the
        tokens that follow the answer are unknown.
    """
    if list(rendered[: len(history)]) != list(history) or list(history[len(history) - len(closer) :]) != closer:
        return None
    if drawn and closer[:1] == list(tokens[-1:]):  # the model has drawn the end of its message itself
        closer = closer[1:]
    return [*tokens, *closer, *rendered[len(history) :]]
