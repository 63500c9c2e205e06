"""Drafts change how many forward passes a text takes, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest
from harness import Harness, assert_same_tokens, make_harness, solo
from tiny import RECURRENT, stages, tiny_model
from word_grammar import END, Words

from mlx_parallm.core.requests import (
    CollectionSpec,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    StopParams,
)
from mlx_parallm.engine.speculate import PromptLookup

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


def options(rng: random.Random, masks: Sequence[bytes]) -> dict[str, Any]:
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
        allowed_tokens=rng.choice(masks),
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
        events = harness.outputs(name, index)
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


def answered(
    family: str,
    count: int,
    speculates: bool,
    lookahead: bool,
    masks: Sequence[bytes],
    draft: nn.Module | None = None,
) -> tuple[Harness, list[list[Any]]]:
    """So many random requests, and what was answered. Every fifth one follows a grammar."""
    rng = random.Random(f"{family} {count}")
    words = [tuple(rng.randrange(250) for _ in range(rng.randint(3, 30))) for _ in range(3)]
    switches = {"speculates": speculates, "lookahead": lookahead, "draft": draft}
    harness = make_harness(tiny_model(family), max_rows=6, eos_ids=(END,), **switches)
    for number in range(count):
        grammar = Words(*words) if number % 5 == 0 else None
        harness.submit(f"{number}", repetitive(rng, rng.randint(3, 90)), grammar=grammar, **options(rng, masks))
        harness.step(number % 5)
    harness.run()
    return harness, [outputs(harness, f"{number}") for number in range(count)]


def assert_drafts_change_no_text(
    family: str, count: int, lookahead: bool, text: bool = True, draft: nn.Module | None = None, least: int = 2
) -> None:
    """`least`: right guesses for each text. A draft model knows no masks, so there are few of them beside it."""
    masks = [b"", bytes(FEW), bytes(FEW)] if draft is None else [b"", b"", b"", bytes(FEW)]
    plain, expected = answered(family, count, False, lookahead, masks)
    drafted, got = answered(family, count, text, lookahead, masks, draft)
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)
    with_drafts, without = drafted.loop.counters, plain.loop.counters
    assert with_drafts.accepted.total() > least * count
    assert with_drafts.drafted.total() > with_drafts.accepted.total(), "some guesses were wrong"
    assert without.drafted.total() == 0
    slack = 1.0 if draft is None else 1.1  # on a busy machine, rows of a draft model catch up later
    assert with_drafts.steps <= slack * without.steps


HUNDREDS = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=HUNDREDS)])
@pytest.mark.parametrize(("family", "lookahead"), [("llama", False), ("gemma3", True)])
def test_texts_are_the_same_with_and_without_drafts(family: str, lookahead: bool, count: int) -> None:
    assert_drafts_change_no_text(family, count, lookahead)


@pytest.mark.parametrize(("family", "lookahead"), [*stages(RECURRENT, False), ("mamba", True)])
def test_states_go_back_to_the_last_token_that_was_right(family: str, lookahead: bool) -> None:
    assert_drafts_change_no_text(family, 20, lookahead, least=1)


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=HUNDREDS)])
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("text", [False, True], ids=["alone", "and texts"])
def test_texts_are_the_same_with_and_without_a_draft_model(lookahead: bool, text: bool, count: int) -> None:
    assert_drafts_change_no_text("llama", count, lookahead, text, tiny_model("llama"), least=1)


def test_a_draft_model_may_draft_for_one_with_recurrent_layers() -> None:
    """It is wrong at almost every token, so states go back again and again."""
    _, expected = answered("lfm2", 12, False, False, [b""])
    drafted, got = answered("lfm2", 12, False, False, [b""], tiny_model("llama"))
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)
    assert drafted.loop.counters.drafted["model"] > 12


class FailingGuesses(Words):
    """Fails when it is asked for a guess, or, with `late`, while the draft is prepared that the scheduler chose."""

    def __init__(self, late: bool) -> None:
        super().__init__(tuple(range(20, 40)))
        self.late = late

    def start(self) -> Words.State:
        return self.Failing(self)

    class Failing(Words.State):
        copies = 0

        def forced(self) -> tuple[int, ...]:
            if not self.grammar.late:
                raise ValueError("injected")
            return super().forced()

        def copy(self) -> Words.State:
            self.copies += 1
            if self.copies == 2:  # the first one checks the guess
                raise ValueError("injected")
            return super().copy()


@pytest.mark.parametrize("late", [False, True])
def test_a_fault_while_a_row_is_guessed_costs_that_row(late: bool) -> None:
    harness = make_harness(eos_ids=(END,), speculates=True, lookahead=False)
    harness.submit("faulty", [1, 2, 3], 30, grammar=FailingGuesses(late))
    harness.submit("even", [4, 5, 6], 12, grammar=Words(tuple(range(10, 18))))
    harness.submit("free", [1, 2, 3, 1, 2, 3, 1, 2], 12)
    harness.run()
    assert isinstance(harness.terminal("faulty"), RequestFailed)
    assert harness.tokens("even") == list(range(10, 18))
    assert_same_tokens(harness.tokens("free"), solo(tiny_model("llama"), [1, 2, 3, 1, 2, 3, 1, 2], 12), 1e-5)


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
    assert drafted.accepted.total() >= 6 * 8


def test_a_row_whose_last_tokens_are_read_before_its_next_unit_ends() -> None:
    """And those that waited for its row are admitted."""
    harness = make_harness(eos_ids=(END,), max_rows=1, speculates=True, lookahead=True)
    for name in ("first", "second"):
        harness.submit(name, [1, 2, 3], 12, grammar=Words((7,)))
    harness.run()
    for name in ("first", "second"):
        assert harness.tokens(name) == [7]
        assert isinstance(harness.terminal(name), RequestFinished)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_what_a_row_with_drafts_leaves_in_the_prefix_cache_is_right(family: str) -> None:
    """Tokens that were computed for a wrong guess are in no block or state that another prompt gets."""
    rng, model = random.Random(1), tiny_model(family)
    prompts = [repetitive(rng, rng.randint(50, 80)) for _ in range(4)]
    found = []
    for speculates in (False, True):
        harness = make_harness(model, speculates=speculates, max_rows=4)
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0.6, seed=i, allowed_tokens=bytes(FEW))
            harness.submit(f"{i}", prompt, 70, sampling=sampling)
        harness.run()
        for i, prompt in enumerate(prompts):
            again = [*prompt, *harness.tokens(f"{i}"), 5, 6]
            harness.submit(f"again {i}", again, 8, sampling=SamplingParams(temperature=0.0, top_logprobs=3))
        harness.run()
        assert harness.runner.cache.hits > 4 * 64
        found.append([outputs(harness, f"again {i}") for i in range(4)])
    for plain, drafted in zip(*found, strict=True):
        assert_same(drafted, plain)


# ---- drafts from the text itself ---------------------------------------------------------------------


def test_a_text_that_grows_is_looked_up_as_a_new_one_would_be() -> None:
    rng = random.Random(0)
    tokens: list[int] = []
    growing = PromptLookup(tokens)
    for _ in range(400):
        tokens.append(rng.randrange(6))
        assert list(growing.propose(5)) == list(searched(tokens, 5))


def searched(tokens: Sequence[int], most: int) -> list[int]:
    """The draft, by trying every place."""
    for length in (3, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if list(tokens[end - length : end]) == list(tokens[len(tokens) - length :]):
                found = list(tokens[end : end + most])
                while len(found) < most:
                    found += found[: most - len(found)]
                return found
    return []
