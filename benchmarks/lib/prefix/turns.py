"""Measures the first token of a second turn, and of another user's request with the same system prompt.

    first turn    [system prompt | message] answer
    second turn   [system prompt | message   answer | question]
    other user    [system prompt | another message]

Every history has texts of its own, so a first turn finds nothing in a cache. The history is the first turn's prompt and
answer, as the same server gave it; its lengths cover all places where a block of 64 tokens can end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.lib.prefix.sides import WITHOUT, Side, ask, rotated
from benchmarks.lib.prefix.texts import MESSAGE_WORDS, Messages, Texts, assistant, user, words

SHORTEST_HISTORY, BLOCK = 750, 64
ANSWER_TOKENS = 16
ASKED_TOKENS = 1
"""Tokens of the requests after the first turn: only their first token is measured."""


@dataclass(slots=True)
class Turns:
    """One server's seconds to the first token. The lists have one value per history.

    Of the second turn and the other user each value is the median of the repeats, which have different questions.
    `*_cached` are the tokens that the server says it found in its cache.
    """

    name: str
    history_tokens: list[int] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    second_s: list[float] = field(default_factory=list)
    other_s: list[float] = field(default_factory=list)
    second_cached: list[int] = field(default_factory=list)
    other_cached: list[int] = field(default_factory=list)


def histories(alignments: int) -> list[int]:
    """The lengths in tokens, spread evenly over the 64 places where a history can end in a block."""
    return [SHORTEST_HISTORY + number * BLOCK // alignments for number in range(alignments)]


async def measure(sides: Sequence[Side], texts: Texts, alignments: int, repeats: int) -> dict[str, Turns]:
    """Measures every history on each server in turn. A server without a prefix cache is left out, because its second
    turn is only a longer first turn."""
    sides = [side for side in sides if side.name != WITHOUT]
    results = {side.name: Turns(side.name) for side in sides}
    for number, tokens in enumerate(histories(alignments)):
        opening = texts.opening(tokens - ANSWER_TOKENS, f"history {tokens}")
        answers: dict[str, str] = {}
        for side in rotated(sides, number):
            answers[side.name] = await _first(side, opening, results[side.name])
        samples = {side.name: _Samples() for side in sides}
        for repeat in range(repeats):
            for side in rotated(sides, number + repeat):
                await _later(side, opening, answers[side.name], f"{tokens} {repeat}", samples[side.name])
        for side in sides:
            samples[side.name].into(results[side.name])
            _tell(results[side.name])
    return results


@dataclass(slots=True)
class _Samples:
    """The repeats of one history on one server."""

    second_s: list[float] = field(default_factory=list)
    other_s: list[float] = field(default_factory=list)
    second_cached: list[int] = field(default_factory=list)
    other_cached: list[int] = field(default_factory=list)

    def into(self, turns: Turns) -> None:
        turns.second_s.append(median(self.second_s))
        turns.other_s.append(median(self.other_s))
        turns.second_cached.append(min(self.second_cached))
        turns.other_cached.append(min(self.other_cached))


async def _first(side: Side, opening: Messages, turns: Turns) -> str:
    with side.peer.awake():
        stream = await ask(side, opening, ANSWER_TOKENS)
    turns.history_tokens.append(stream.prompt_tokens + stream.tokens)
    turns.first_s.append(stream.first_token_s)
    return stream.text


async def _later(side: Side, opening: Messages, answer: str, seed: str, samples: _Samples) -> None:
    question, other = (user(words(MESSAGE_WORDS, f"{kind} {seed}")) for kind in ("question", "other"))
    with side.peer.awake():
        second = await ask(side, [*opening, assistant(answer), question], ASKED_TOKENS)
        another = await ask(side, [opening[0], other], ASKED_TOKENS)
    samples.second_s.append(second.first_token_s)
    samples.other_s.append(another.first_token_s)
    samples.second_cached.append(second.cached_tokens)
    samples.other_cached.append(another.cached_tokens)


def _tell(turns: Turns) -> None:
    print(
        f"  {turns.history_tokens[-1]} tokens  {turns.name:<14} first turn {turns.first_s[-1]:5.2f} s, "
        f"second {turns.second_s[-1]:5.2f} s, other user {turns.other_s[-1]:5.2f} s",
        flush=True,
    )
