"""Layers that call their cache themselves, with a window."""

from __future__ import annotations

from family_checks import build
from harness import TINY, assert_same_tokens, make_harness, solo

NAME, WINDOW = "baichuan_m1", 8


def test_rows_see_what_the_window_shows_whatever_their_chunks() -> None:
    rows = [[(7 * at + row) % 60 for at in range(20 + 13 * row)] for row in range(3)]
    harness = make_harness(build(NAME, sliding_window=WINDOW), max_batched_tokens=16)
    for number, row in enumerate(rows):
        harness.submit(str(number), row, 6)
    harness.run()
    for number, row in enumerate(rows):
        reference = solo(build(NAME, sliding_window=WINDOW), row, 6)
        assert_same_tokens(harness.tokens(str(number)), reference, TINY)
