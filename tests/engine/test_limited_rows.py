"""Rows whose tokens are limited by the request, in a batch with rows of all kinds: each draws what it draws alone."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from harness import TINY, Harness, assert_same_tokens, make_harness, solo
from tiny import tiny_model

from mlx_parallm.core.requests import SamplingParams, StopParams

VOCAB = 263


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(250) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def mask(allowed: set[int]) -> bytes:
    bits = bytearray(-(-VOCAB // 8))
    for token in allowed:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


def kinds() -> list[dict[str, Any]]:
    """The options of rows. The bad words are what the model says by itself, so they change its answers."""
    said = solo(tiny_model("llama"), [1, 2, 3], 12).tokens
    pairs = tuple(itertools.pairwise(said))
    return [
        {},
        {"sampling": SamplingParams(temperature=0.9, seed=3, allowed_tokens=mask(set(range(0, 250, 3))))},
        {"sampling": SamplingParams(temperature=0.0, bad_words=pairs)},
        {"sampling": SamplingParams(temperature=0.7, seed=5, bad_words=((said[0],), (said[1],), pairs[2]))},
        {"stopping": StopParams(30, min_tokens=4, stop_token_ids=tuple(range(0, 250, 2)))},
        {"stopping": StopParams(30, stop=("<1",), include_stop=True)},
    ]


def text(harness: Harness, request: str) -> str:
    return "".join(event.text for event in harness.outputs(request))


def test_every_row_of_a_mixed_batch_draws_what_it_draws_alone() -> None:
    options = kinds()
    rows = [(str(i), prompt, options[i % len(options)]) for i, prompt in enumerate(prompts(12, seed=4))]
    harness = make_harness(max_rows=6)
    for i, (name, prompt, kind) in enumerate(rows):
        harness.submit(name, prompt, 20, **kind)
        harness.step(i % 4)
    harness.run()
    for name, prompt, kind in rows:
        alone = make_harness(max_rows=1)
        alone.answer(name, prompt, 20, **kind)
        assert harness.tokens(name) == alone.tokens(name)
        assert text(harness, name) == text(alone, name)
        if not kind:
            assert_same_tokens(harness.tokens(name), solo(tiny_model("llama"), prompt, 20), TINY)


@pytest.mark.parametrize("lookahead", [False, True])
def test_no_answer_has_a_bad_word_even_if_steps_are_launched_ahead(lookahead: bool) -> None:
    prompt = [3, 1, 4, 1, 5]
    said = solo(tiny_model("llama"), prompt, 16).tokens
    words = ((said[3], said[4]), (said[0],))
    harness = make_harness(lookahead=lookahead)
    harness.submit("bound", prompt, 16, sampling=SamplingParams(temperature=0.0, bad_words=words))
    harness.submit("free", prompt, 16)
    harness.run()
    got = harness.tokens("bound")
    assert said[0] not in got
    assert not any(pair == words[0] for pair in itertools.pairwise(got))
    assert harness.tokens("free") == said


def test_preempted_rows_remember_what_they_must_not_write() -> None:
    options = SamplingParams(temperature=1.2, seed=9, bad_words=tuple((a, b) for a in range(40) for b in range(3)))
    harness = make_harness(budget_tokens=192)
    for i in range(5):
        harness.submit(str(i), [7, 7, i], 90, sampling=options)
    harness.run()
    assert harness.loop.scheduler.preemptions > 0
    alone = make_harness()
    alone.answer("0", [7, 7, 0], 90, sampling=options)
    assert harness.tokens("0") == alone.tokens("0")
