"""Stop strings at text level, held-back text, and how a sequence ends."""

from __future__ import annotations

from typing import SupportsIndex

import pytest
from harness import make_harness
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.core.requests import FinishReason, StopParams
from mlx_parallm.engine.text import StopMatcher, TextStream

SMALL = st.text(alphabet="abc", min_size=0, max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


class Pieces:
    """A detokenizer whose token i is pieces[i]; `tail` is released at the end."""

    def __init__(self, *pieces: str, tail: str = "") -> None:
        self.pieces = pieces
        self.tail = tail

    def add(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        tail, self.tail = self.tail, ""
        return tail


def stream(*pieces: str, eos: int | None = None, tail: str = "", **stopping: object) -> TextStream:
    params = StopParams(**{"max_tokens": 99, **stopping})
    end_ids = frozenset() if eos is None else frozenset({eos})
    return TextStream(Pieces(*pieces, tail=tail), StopMatcher(params), params, end_ids)


@given(SMALL, STOPS, st.booleans(), st.data())
def test_stop_is_found_wherever_the_text_is_cut(
    text: str, stops: tuple[str, ...], included: bool, data: st.DataObject
) -> None:
    """Released text and stop are those of a search over the whole text, at the first end of a match."""
    matcher = StopMatcher(StopParams(99, stop=stops, include_stop=included))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    released, stopped = "", None
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        piece, stopped = matcher.feed(text[start:end])
        released += piece
        if stopped is not None:
            break
        assert not included or released == text[:end], "nothing has to be held back"
    if stopped is None:
        assert not any(stop in text for stop in stops)
        assert released + matcher.flush() == text
    else:
        until, whole = StopMatcher(StopParams(99, stop=stops)).feed(text)
        assert (released, stopped) == (until + stopped * included, whole), "wherever it is cut"
        assert text.startswith(until + stopped)
        assert not any(stop in (until + stopped)[:-1] for stop in stops)


@given(SMALL, STOPS)
def test_text_that_cannot_begin_a_stop_is_released_at_once(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(StopParams(99, stop=stops))
    released, stopped = matcher.feed(text + "z")
    assert stopped is not None or released == text + "z"


class CountedText(str):
    """Counts the characters that are looked at one by one."""

    looked_at = 0

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        CountedText.looked_at += 1
        return super().__getitem__(index)


def test_long_stops_cost_little_whatever_the_text() -> None:
    """Stop strings of the greatest length that nearly match, over and over, at each character."""
    stops = tuple("a" * (1000 + n) + "b" for n in range(16))
    matcher = StopMatcher(StopParams(99, stop=stops))
    pieces = [CountedText("a" * 79 + "c") for _ in range(10)] + [CountedText("a" * 80)] * 12 + [CountedText("c")]
    CountedText.looked_at = 0
    assert all(matcher.feed(piece)[1] is None for piece in pieces)
    per_stop = CountedText.looked_at / len(stops)
    assert per_stop <= 2 * sum(map(len, pieces)) + max(map(len, stops))


def test_held_text_is_released_when_the_sequence_ends_otherwise() -> None:
    text = stream("a", "b", stop=("bc",), max_tokens=2, tail="\ufffd")
    assert text.accept(0).text == "a"
    last = text.accept(1)
    assert (last.text, last.finish_reason) == ("b\ufffd", FinishReason.LENGTH)


def test_a_stop_token_ends_the_text_and_says_which() -> None:
    """Also with `ignore_eos`. The end-of-sequence token keeps its own reason."""
    first = make_harness()
    first.answer("r", [1, 2, 3], max_tokens=3)
    tokens = first.tokens("r")
    harness = make_harness(eos_ids=[tokens[2]])
    stops = (tokens[1], tokens[2])
    harness.submit("stopped", [1, 2, 3], stopping=StopParams(9, ignore_eos=True, stop_token_ids=stops))
    harness.submit("ended", [1, 2, 3], stopping=StopParams(9, stop_token_ids=(tokens[2],)))
    harness.run()
    ends = [harness.outputs(name)[-1] for name in ("stopped", "ended")]
    end = next(place for place, token in enumerate(tokens) if token in stops)
    assert harness.tokens("stopped") == tokens[: end + 1]
    assert [(e.text, e.finish_reason, e.stop_reason) for e in ends] == [
        ("", FinishReason.STOP, tokens[end]),
        ("", FinishReason.STOP, None),
    ]


def test_stop_tokens_are_not_drawn_before_min_tokens() -> None:
    first = make_harness()
    first.answer("r", [1, 2, 3], max_tokens=1)
    [token] = first.tokens("r")
    harness = make_harness()
    harness.answer("r", [1, 2, 3], stopping=StopParams(4, min_tokens=2, stop_token_ids=(token,)))
    assert token not in harness.tokens("r")[:2]


def test_ignore_eos_goes_on() -> None:
    end = make_harness()
    end.answer("r", [1, 2, 3], max_tokens=1)
    harness = make_harness(eos_ids=end.tokens("r"))
    harness.submit("stops", [1, 2, 3], max_tokens=3)
    harness.submit("goes on", [1, 2, 3], stopping=StopParams(3, ignore_eos=True))
    harness.run()
    assert [len(harness.tokens(name)) for name in ("stops", "goes on")] == [1, 3]


@pytest.mark.parametrize(("min_tokens", "ends_at"), [(0, 0), (2, 1), (3, 2)])
def test_stops_count_only_from_min_tokens(min_tokens: int, ends_at: int) -> None:
    text = stream("x", stop=("x",), min_tokens=min_tokens)
    reasons = [text.accept(0).finish_reason for _ in range(ends_at + 1)]
    assert reasons == [None] * ends_at + [FinishReason.STOP]


def test_an_included_end_token_is_part_of_the_text_if_it_is_text() -> None:
    ended = stream("a", "</s>", eos=1, include_stop=True)
    assert [ended.accept(0).text, ended.accept(1).text] == ["a", "</s>"]
    stopped = stream("a", "<end>", stop_token_ids=(1,), include_stop=True)
    assert [stopped.accept(0).text, stopped.accept(1).text] == ["a", "<end>"]
