"""A draft model proposes tokens, and changes nothing but the number of passes."""

from __future__ import annotations

import time

import numpy as np
import pytest
from harness import Harness, assert_same_tokens, make_harness, solo
from lora import layout_of, random_adapter
from tiny import VOCAB_SIZE, tiny_model

from mlx_parallm.core.requests import RequestFinished, SamplingParams
from mlx_parallm.engine import draft_model
from mlx_parallm.engine.draft_model import DraftModel
from mlx_parallm.engine.speculate import EXPECTED, Drafter, Source

PROMPT = [i * i % 251 for i in range(40)]


def draft_of(harness: Harness) -> DraftModel:
    model = harness.loop.draft_model
    assert model is not None
    return model


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_draft_model_with_the_same_weights_is_always_right(lookahead: bool) -> None:
    """The prompts are longer than a chunk of a draft row, and differ in length."""
    model, lengths = tiny_model("llama"), (3, 40, 700)
    harness = make_harness(model, draft=tiny_model("llama"), lookahead=lookahead)
    for length in lengths:
        harness.submit(f"{length}", (PROMPT * 20)[:length], 33)
    harness.run()
    for length in lengths:
        assert_same_tokens(harness.tokens(f"{length}"), solo(model, (PROMPT * 20)[:length], 33), 1e-5)
    counters = harness.loop.counters
    assert counters.accepted.total() == counters.drafted.total() > 60
    assert harness.loop.stats().detail["accepted_draft_tokens_by_source"] == {"model": counters.drafted.total()}
    assert counters.steps < 50, "without a draft model they are at least 99 - 66"
    assert draft_of(harness).bytes_held == 0 or not list(draft_of(harness)._cache.rows)


def test_a_vocabulary_that_is_padded_less_or_more_costs_nothing() -> None:
    prompt = [*PROMPT, VOCAB_SIZE - 1, VOCAB_SIZE - 2]
    for size in (VOCAB_SIZE - 4, VOCAB_SIZE + 9):
        harness = make_harness(draft=tiny_model("llama", vocab_size=size), lookahead=False)
        harness.answer("x", prompt, 12)
        assert_same_tokens(harness.tokens("x"), solo(tiny_model("llama"), prompt, 12), 1e-5)
        assert harness.loop.counters.drafted.total() > 0


def test_the_base_drafts_for_its_adapters_only() -> None:
    model, found = tiny_model("llama"), []
    weights = random_adapter(layout_of(model), seed=3, size=0.03)
    for draft in (None, model):
        harness = make_harness(model, draft=draft, lookahead=False)
        ref = harness.publish("a", weights)
        harness.answer("base", PROMPT, 20)
        assert harness.loop.counters.drafted.total() == 0
        for seed in range(3):
            sampling = SamplingParams(temperature=0.3 * seed, seed=seed)
            harness.submit(f"{seed}", PROMPT[seed:], 20, adapter=ref, sampling=sampling)
        harness.submit("beside", PROMPT[5:], 20)
        harness.run()
        found.append([harness.tokens(name) for name in ("base", "0", "1", "2", "beside")])
    assert found[0] == found[1]
    assert harness.loop.counters.accepted.total() > 10


def test_a_fault_of_the_draft_model_costs_its_drafts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make_harness(draft=tiny_model("llama"), lookahead=False)
    runner = draft_of(harness)._runner
    works, passes = runner.last_logits, []

    def fails(*arguments):
        passes.append(len(passes))
        if len(passes) in (9, 12):
            raise RuntimeError("injected")
        return works(*arguments)

    monkeypatch.setattr(runner, "last_logits", fails)
    monkeypatch.setattr(draft_model, "_REST", 10)
    for name in ("one", "two"):
        harness.submit(name, PROMPT[len(name) :], 40)
    harness.run()
    for name in ("one", "two"):
        assert isinstance(harness.terminal(name), RequestFinished)
        assert_same_tokens(harness.tokens(name), solo(tiny_model("llama"), PROMPT[len(name) :], 40), 1e-5)
    assert harness.loop.counters.failed_steps == 2, "it rested, was tried again and rested"
    before = harness.loop.counters.drafted.total()
    harness.answer("later", PROMPT, 50)
    assert harness.loop.counters.drafted.total() > before


def test_draft_rows_give_way_when_memory_is_short() -> None:
    """The pool holds the rows, and not those of the draft model too."""
    model = tiny_model("llama")
    harness = make_harness(model, draft=tiny_model("llama"), budget_tokens=7 * 64, lookahead=False, max_rows=3)
    for number in range(3):
        harness.submit(f"{number}", PROMPT[number:], 88)
    harness.run()
    for number in range(3):
        assert_same_tokens(harness.tokens(f"{number}"), solo(model, PROMPT[number:], 88), 1e-5)
    assert harness.loop.counters.drafted.total() > 0
    assert harness.loop.scheduler.preemptions == 0


def test_an_aborted_row_leaves_no_draft_row() -> None:
    harness = make_harness(draft=tiny_model("llama"), lookahead=False)
    harness.submit("gone", PROMPT, 90)
    harness.until(lambda: harness.tokens("gone"))
    harness.loop.step()
    assert len(list(draft_of(harness)._cache.rows)) == 1
    harness.loop.abort("gone")
    harness.run()
    assert not list(draft_of(harness)._cache.rows)
    assert draft_of(harness).bytes_held == 0, "nor its memory, though no unit follows"


def test_drafts_are_timed_by_what_their_passes_take(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, taken = make_harness(draft=tiny_model("llama"), lookahead=False), list[float]()
    monkeypatch.setattr(draft_of(harness).cost, "observe", lambda chunks, samples, seconds, now: taken.append(seconds))
    began = time.monotonic()
    harness.answer("timed", PROMPT, 30)
    assert min(taken) > 0.0
    assert sum(taken) < time.monotonic() - began


def test_a_group_computes_its_prompt_once_in_the_draft_model_too(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make_harness(draft=tiny_model("llama"), lookahead=False)
    runner, computed = draft_of(harness)._runner, []
    works = runner.last_logits
    monkeypatch.setattr(runner, "last_logits", lambda spans, ids: computed.append(ids.size) or works(spans, ids))
    harness.answer("group", (PROMPT * 20)[:400], 12, n=4, sampling=SamplingParams(temperature=0.5, seed=1))
    assert 400 <= sum(computed) < 800


# -- how often it is right -----------------------------------------------------------------------


def test_a_draft_model_that_was_wrong_is_tried_again_after_a_while() -> None:
    of_all, sources = dict(EXPECTED), frozenset({Source.MODEL})
    row = Drafter([1, 2, 3], sources, of_all)
    first = row.acceptance[Source.MODEL]
    for _ in range(200):
        row.take_from_model([7], None)
        row.add(False)
    wrong = row.acceptance[Source.MODEL]
    assert wrong < 0.01 * first
    assert Drafter([1], sources, of_all).acceptance[Source.MODEL] < 0.1 * first, (
        "new rows begin with what others have seen"
    )
    for _ in range(20_000):
        row.propose(None)
    assert row.acceptance[Source.MODEL] > 0.9 * first


def test_the_share_of_right_tokens_is_that_of_the_row_and_of_all_rows() -> None:
    of_all = dict(EXPECTED)
    good, bad = (Drafter([1, 2, 3], frozenset({Source.TEXT}), of_all) for _ in range(2))
    for _ in range(30):
        good.add(True)
        bad.add(False)
    assert good.acceptance[Source.TEXT] > 0.9
    assert bad.acceptance[Source.TEXT] < 0.1
    np.testing.assert_allclose(of_all[Source.TEXT], 0.4, atol=0.1)
