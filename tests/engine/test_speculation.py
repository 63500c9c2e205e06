"""Drafts change how many forward passes a text takes, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from harness import Harness, make_harness
from tiny import tiny_model
from word_grammar import END, Words

from mlx_parallm.core import CollectionSpec, SamplingParams, SequenceOutput, StopParams

VOCAB = 263
FEW = bytearray(-(-VOCAB // 8))
for token in (3, 7, 9, 40, 80):
    FEW[token // 8] |= 1 << token % 8
"""A mask of few tokens. A text of them repeats itself."""


def repetitive(rng: random.Random, length: int) -> list[int]:
    """A prompt of few phrases, so that much of it occurs more than once."""
    phrases = [[rng.randrange(250) for _ in range(rng.randint(2, 6))] for _ in range(3)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += rng.choice(phrases)
    return tokens[:length]


def options(rng: random.Random) -> dict[str, Any]:
    temperature = rng.choice([0.0, 0.0, 0.3, 1.0])
    sampling = SamplingParams(
        temperature=temperature,
        seed=rng.randrange(1000),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 5]),
        top_logprobs=rng.choice([None, 0, 3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.2]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
        logit_bias=rng.choice([(), ((7, 4.0),)]),
        allowed_tokens=rng.choice([b"", bytes(FEW), bytes(FEW)]),
        bad_words=rng.choice([(), ((7, 9), (11,))]),
    )
    stopping = StopParams(
        rng.randint(1, 40),
        stop=rng.choice([(), ("<1",)]),
        min_tokens=rng.choice([0, 3]),
        stop_token_ids=rng.choice([(), (5, 17)]),
    )
    collected = {"collection": CollectionSpec(group_id="")} if rng.random() < 0.3 else {}
    return {"sampling": sampling, "stopping": stopping, "n": rng.choice([1, 1, 3]), **collected}


def outputs(harness: Harness, name: str) -> list[Any]:
    """Tokens, text, reasons and logprobs of each choice."""
    found = []
    for index in range(3):
        events = [e for e in harness.of(name) if isinstance(e, SequenceOutput) and e.index == index]
        ids = [token for e in events for token in e.token_ids]
        text = "".join(e.text for e in events)
        logprobs = [(one.logprob, *[value for _, value in one.top]) for e in events for one in e.logprobs]
        drawn = [(value,) for e in events for value in e.sampling_logprobs]
        found.append((ids, text, [e.finish_reason for e in events][-1:], [*logprobs, *drawn]))
    return found


def assert_same(got: list[Any], expected: list[Any]) -> None:
    for (ids, text, reasons, logprobs), (want_ids, want_text, want_reasons, want) in zip(got, expected, strict=True):
        assert (ids, text, reasons) == (want_ids, want_text, want_reasons)
        assert len(logprobs) == len(want)
        for one, other in zip(logprobs, want, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_texts_are_the_same_with_and_without_drafts(family: str, lookahead: bool) -> None:
    rng = random.Random(family)
    model = tiny_model(family)
    rows = [(f"{i}", repetitive(rng, rng.randint(3, 90)), options(rng)) for i in range(40)]
    found = []
    for speculates in (False, True):
        harness = make_harness(model, max_rows=6, speculates=speculates, lookahead=lookahead)
        for i, (name, prompt, kind) in enumerate(rows):
            harness.submit(name, prompt, **kind)
            for _ in range(i % 5):
                harness.loop.step()
        harness.run()
        found.append((harness, [outputs(harness, name) for name, _, _ in rows]))
    for plain, drafted in zip(found[0][1], found[1][1], strict=True):
        assert_same(drafted, plain)
    with_drafts, without = found[1][0].loop.counters, found[0][0].loop.counters
    assert with_drafts.accepted_tokens > 100
    assert with_drafts.draft_tokens > with_drafts.accepted_tokens, "some guesses were wrong"
    assert without.draft_tokens == 0
    assert with_drafts.steps < without.steps


def test_a_grammar_guesses_the_tokens_that_it_demands_and_cuts_other_guesses() -> None:
    """The prompt says what the grammar forbids, so its guesses are cut."""
    words = (tuple(range(20, 32)), (*range(20, 25), 99, *range(40, 46)))
    found = []
    for speculates in (False, True):
        harness = make_harness(eos_ids=(END,), speculates=speculates)
        for seed in range(6):
            sampling = SamplingParams(temperature=1.0, seed=seed)
            harness.submit(f"{seed}", [20, 21, 22, 23, 60, 61, 20, 21], 30, grammar=Words(*words), sampling=sampling)
        harness.submit("free", [1, 2, 3, 1, 2, 3, 1, 2], 6)
        harness.run()
        found.append((harness.loop.counters, [harness.tokens(name) for name in (*map(str, range(6)), "free")]))
    (plain, texts), (drafted, same) = found
    assert texts == same
    assert {tuple(text) for text in texts[:6]} == set(words)
    assert drafted.steps < plain.steps
    assert drafted.accepted_tokens >= 6 * 8


def test_what_a_row_with_drafts_leaves_in_the_prefix_cache_is_right() -> None:
    """Tokens that were computed for a wrong guess are in no block that another prompt gets."""
    rng, model = random.Random(1), tiny_model("llama")
    prompts = [repetitive(rng, rng.randint(50, 80)) for _ in range(12)]
    found = []
    for speculates in (False, True):
        harness = make_harness(model, speculates=speculates, max_rows=4)
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0.6, seed=i, allowed_tokens=bytes(FEW))
            harness.submit(f"{i}", prompt, 90, sampling=sampling)
        harness.run()
        for i, prompt in enumerate(prompts):
            again = [*prompt, *harness.tokens(f"{i}"), 5, 6]
            harness.submit(f"again {i}", again, 8, sampling=SamplingParams(temperature=0.0, top_logprobs=3))
        harness.run()
        assert harness.runner.cache.hits > 12 * 64
        found.append([outputs(harness, f"again {i}") for i in range(12)])
    for plain, drafted in zip(*found, strict=True):
        assert_same(drafted, plain)
