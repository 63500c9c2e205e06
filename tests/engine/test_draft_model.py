"""A draft model proposes tokens, and changes nothing but the number of passes."""

from __future__ import annotations

import pytest
from harness import Harness, assert_same_tokens, make_harness, solo
from lora import layout_of, random_adapter
from tiny import VOCAB_SIZE, tiny_model

from mlx_parallm.core.requests import RequestFinished, SamplingParams
from mlx_parallm.engine import draft_model
from mlx_parallm.engine.draft_model import DraftModel

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


def test_it_drafts_for_sequences_with_adapters_too() -> None:
    model, found = tiny_model("llama"), []
    weights = random_adapter(layout_of(model), seed=3, size=0.03)
    for draft in (None, tiny_model("llama")):
        harness = make_harness(model, draft=draft, lookahead=False)
        ref = harness.publish("a", weights)
        for seed in range(3):
            sampling = SamplingParams(temperature=0.3 * seed, seed=seed)
            harness.submit(f"{seed}", PROMPT[seed:], 20, adapter=ref, sampling=sampling)
        harness.submit("beside", PROMPT[5:], 20)
        harness.run()
        found.append([harness.tokens(name) for name in ("0", "1", "2", "beside")])
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
