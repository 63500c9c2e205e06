"""Every row of a mixed batch equals its solo run: families, joins, leaves, groups, preemption, scores."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from family_checks import build
from harness import TINY, Solo, assert_same_tokens, assert_solo, make_harness, solo
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, tiny_model

from mlx_parallm.core.requests import PromptScored, RequestFinished, SamplingParams, SequenceOutput, StopParams


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v3"])
def test_rows_that_join_and_leave_equal_their_solo_runs(family: str) -> None:
    model = tiny_model(family)
    rows = prompts(10, 90)
    lengths = [random.Random(i).randint(1, 40) for i in range(len(rows))]
    references = [solo(model, row, length) for row, length in zip(rows, lengths, strict=True)]
    harness = make_harness(model, max_rows=6)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        harness.submit(str(i), row, length)
        harness.step(i % 4)
    harness.run()
    for i, reference in enumerate(references):
        assert isinstance(harness.terminal(str(i)), RequestFinished)
        assert_same_tokens(harness.tokens(str(i)), reference, TINY)


def test_a_model_whose_trunk_does_not_run_alone_runs_whole() -> None:
    model = build("ours phixtral")
    rows = [[3, 1, 4], list(range(70))]
    harness = make_harness(model)
    harness.submit_all(rows, 5)
    harness.run()
    assert_solo(harness, model, rows, 5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_half_precision_rows_of_different_lengths_share_a_step(family: str) -> None:
    """As on a GPU, where weights stay as stored; logprobs to bfloat16's precision."""
    model = tiny_model(family)
    model.set_dtype(mx.bfloat16)
    harness = make_harness(model)
    rows = prompts(4, 60, seed=12)
    harness.submit_all(rows, 6, sampling=SamplingParams(temperature=0.0, top_logprobs=0))
    harness.run()
    for i, row in enumerate(rows):
        assert isinstance(harness.terminal(str(i)), RequestFinished)
        logits = model(mx.array([row]))[0, -1].astype(mx.float32)
        first = next(e for e in harness.of(str(i)) if isinstance(e, SequenceOutput))
        expected = (logits[first.token_ids[0]] - mx.logsumexp(logits)).item()
        assert first.logprobs[0].logprob == pytest.approx(expected, abs=0.3)


@pytest.fixture(scope="module")
def llama() -> object:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def references(llama: object) -> list[tuple[list[int], Solo]]:
    return [(row, solo(llama, row, 30)) for row in prompts(12, 150, seed=1)]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_interleaving_with_aborts_and_preemption(
    llama: object, references: list[tuple[list[int], Solo]], data: st.DataObject
) -> None:
    """A pool too small for all makes rows preempt and recompute; nobody's tokens change, nobody fails."""
    harness = make_harness(llama, budget_tokens=data.draw(st.sampled_from([256, 600, 2000])), max_rows=5)
    aborted = set()
    for i, (row, reference) in enumerate(references):
        harness.submit(str(i), row, data.draw(st.integers(1, len(reference.tokens)), label="max_tokens"))
        harness.step(data.draw(st.integers(0, 5), label="steps"))
        if data.draw(st.integers(0, 4), label="abort") == 0:
            aborted.add(victim := str(data.draw(st.integers(0, i))))
            harness.loop.abort(victim)
            harness.loop.check_integrity()
    harness.run()
    assert harness.runner.cache.bytes_used == 0
    for i, (_, reference) in enumerate(references):
        got = harness.tokens(str(i))
        shown = Solo(reference.tokens[: len(got)], reference.gaps[: len(got)])
        assert_same_tokens(got, shown, TINY)
        if str(i) not in aborted:
            assert isinstance(harness.terminal(str(i)), RequestFinished)


def test_rows_that_are_taken_back_for_another_key_equal_their_solo_runs(llama: object) -> None:
    harness = make_harness(llama, max_rows=4)
    rows = prompts(6, 60, seed=14)
    harness.submit_all(rows[:4], 40, key="first")
    harness.until(lambda: len(harness.tokens("0")) >= 20)
    for i, row in enumerate(rows[4:], 4):
        harness.submit(str(i), row, 40, key="later")
    harness.run()
    assert harness.loop.stats().preemptions_total >= 2, "each key had two of the four rows"
    assert_solo(harness, llama, rows, 40)


def test_sampled_rows_do_not_depend_on_neighbours_or_preemption(llama: object) -> None:
    """Same seed, other company, smaller pool: the same tokens."""
    sampled = SamplingParams(temperature=1.0, top_p=0.9, seed=7, presence_penalty=0.5)
    row = prompts(1, 60, seed=3)[0]
    alone = make_harness(llama)
    alone.answer("x", row, 40, sampling=sampled)
    crowded = make_harness(llama, budget_tokens=4 * 64)
    for i, other in enumerate(prompts(3, 50, seed=4)):
        crowded.submit(str(i), other, 60, sampling=SamplingParams(temperature=0.7, seed=i))
    crowded.submit("x", row, 40, sampling=sampled)
    crowded.run()
    assert crowded.loop.stats().preemptions_total > 0
    assert crowded.tokens("x") == alone.tokens("x")


@pytest.mark.parametrize("max_rows", [5, 3])
def test_a_group_prefills_its_prompt_once(llama: object, max_rows: int) -> None:
    """Also if some of its rows open when none is left to share with: the prefix cache has the prompt."""
    row = prompts(1, 90, seed=5)[0] * 2
    harness = make_harness(llama, max_rows=max_rows)
    harness.answer("g", row, 6, n=5)
    assert harness.loop.counters.prefilled_tokens == len(row)
    reference = solo(llama, row, 6)
    for index in range(5):
        assert_same_tokens(harness.tokens("g", index), reference, TINY)
    finished = harness.terminal("g")
    assert isinstance(finished, RequestFinished)
    assert (finished.prompt_tokens, finished.completion_tokens) == (len(row), 30)


def test_samples_of_a_group_draw_with_seeds_of_their_own(llama: object) -> None:
    row = prompts(1, 30, seed=6)[0]
    group = make_harness(llama)
    group.answer("g", row, 12, n=3, sampling=SamplingParams(seed=40))
    single = make_harness(llama)
    single.answer("s", row, 12, sampling=SamplingParams(seed=42))
    assert group.tokens("g", 2) == single.tokens("s")
    assert len({tuple(group.tokens("g", i)) for i in range(3)}) == 3


@pytest.mark.parametrize("length", [1, 2, 17, 200])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs_equal_a_plain_forward(llama: object, length: int, max_tokens: int) -> None:
    row = (prompts(4, 90, seed=8)[0] * 20)[:length]
    harness = make_harness(llama)
    harness.submit_all(prompts(3, 60, seed=9), 20)
    harness.loop.step()
    harness.answer("scored", row, prompt_logprobs=2, stopping=StopParams(max_tokens))
    assert len(harness.tokens("scored")) == max_tokens
    (scored,) = [e for e in harness.of("scored") if isinstance(e, PromptScored)]
    assert scored.logprobs[0] is None
    logits = llama(mx.array([row]))[0]
    logprobs = (logits - mx.logsumexp(logits, -1, keepdims=True)).tolist()
    for entry, target, expected in zip(scored.logprobs[1:], row[1:], logprobs, strict=False):
        assert entry is not None
        assert (entry.token_id, entry.logprob) == (target, pytest.approx(expected[target], abs=TINY))
        assert [value for _, value in entry.top] == pytest.approx(sorted(expected)[:-3:-1], abs=TINY)
    assert len(scored.logprobs) == length


def test_whole_vocabularies_equal_a_plain_forward_and_are_computed_in_turns(llama: object) -> None:
    """Of the drawn tokens and of the prompt, for requests that run together, beside one that reports nothing."""
    rows = prompts(2, 30, seed=12)
    harness = make_harness(llama)
    harness.submit("beside", prompts(1, 30, seed=13)[0], 12)
    vocab = llama(mx.array([[1]])).shape[-1]
    for name, row in zip("ab", rows, strict=True):
        sampling = SamplingParams(temperature=0.0, top_logprobs=vocab)
        harness.submit(name, row, 3, n=2, sampling=sampling, prompt_logprobs=vocab)
    harness.run()
    for name, row in zip("ab", rows, strict=True):
        logits = llama(mx.array([row + harness.tokens(name, 1)]))[0]
        logprobs = logits - mx.logsumexp(logits, -1, keepdims=True)
        (scored,) = [e for e in harness.of(name) if isinstance(e, PromptScored)]
        drawn = [e.logprobs[0] for e in harness.of(name) if isinstance(e, SequenceOutput) and e.index == 1]
        for entry, expected in zip([*scored.logprobs[1:], *drawn], logprobs, strict=False):
            ids, values = zip(*entry.top, strict=True)
            assert sorted(ids) == list(range(vocab))
            assert values == pytest.approx(expected[mx.array(ids)].tolist(), abs=TINY)
            assert list(values) == sorted(values, reverse=True)
