"""What rows take from the prefix cache is what they would have computed: every answer equals its run without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from harness import TINY, Harness, make_harness
from lora import layout_of, random_adapter
from mixed_batch import text
from tiny import FAMILIES, stages, tiny_model
from word_grammar import Words

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import (
    CollectionSpec,
    PromptScored,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.kv.blocks import BLOCK_TOKENS

pytestmark = pytest.mark.ci

GEMMA = 4e-5
"""The logits of random gemmas reach 45, where float32 has steps of 4e-6."""

SHOWN = SamplingParams(temperature=0.0, top_logprobs=3)


def model_of(family: str) -> nn.Module:
    """Windows are longer than a block, so that a row passes blocks that are half in a window."""
    return tiny_model(family, **({"sliding_window": 100} if family.startswith("gemma3") else {}))


def tolerance(model: nn.Module) -> float:
    return GEMMA if model.model_type.startswith("gemma") else TINY


def assert_drawn_by(model: nn.Module, row: Sequence[int], got: Sequence[SequenceOutput]) -> None:
    """Teacher-forced: each greedy token is the model's best, or as good within ten times the tolerance, and its logprob
    is the model's."""
    tokens = [token for output in got for token in output.token_ids]
    if not tokens:
        return
    logits = model(mx.array([[*row, *tokens[:-1]]]))[0, len(row) - 1 :]
    logprobs = logits - mx.logsumexp(logits, -1, keepdims=True)
    best = logprobs.max(-1).tolist()
    for at, (output, token) in enumerate(zip(got, tokens, strict=True)):
        expected = logprobs[at, token].item()
        assert best[at] - expected <= 10 * tolerance(model), f"token {at}: {token}"
        for entry in output.logprobs:
            assert entry.logprob == pytest.approx(expected, abs=tolerance(model))


def assert_same_answer(one: Harness, other: Harness, request_id: str, n: int = 1, within: float = TINY) -> None:
    """Tokens, texts and reasons are equal. Each run is `within` of the exact logprobs, so they differ by twice that."""
    for index in range(n):
        ours, theirs = one.outputs(request_id, index), other.outputs(request_id, index)
        assert len(ours) == len(theirs) > 0
        for a, b in zip(ours, theirs, strict=True):
            assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (
                b.token_ids,
                b.text,
                b.finish_reason,
                b.stop_reason,
            )
            assert a.sampling_logprobs == pytest.approx(b.sampling_logprobs, abs=2 * within)
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert x.logprob == pytest.approx(y.logprob, abs=2 * within)
                assert [value for _, value in x.top] == pytest.approx([value for _, value in y.top], abs=2 * within)


# ---- cached equals uncached ------------------------------------------------------------------------

SYSTEM = text(150, seed=1)
FIRST: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": [*SYSTEM, 1, 2, 3], "max_tokens": 20, "sampling": SHOWN},
    "long": {"prompt": text(290, seed=2), "max_tokens": 50},
    "on a": {"prompt": [*SYSTEM, 4], "max_tokens": 20, "adapter": AdapterRef("a", 1)},
    "on b": {"prompt": SYSTEM, "max_tokens": 30, "adapter": AdapterRef("b", 1)},
}
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, top_logprobs=2)
PENALISED = SamplingParams(temperature=0.8, seed=6, presence_penalty=0.5, repetition_penalty=1.3, frequency_penalty=0.2)


WORDS = Words(tuple(range(20, 40)), tuple(range(60, 80)))


def second_wave(answers: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
    """Turns that go on from an answer, and other requests with a prompt that was computed in part."""
    turn = {rid: [*fields["prompt"], *answers[rid], 7, 8, 9] for rid, fields in FIRST.items()}
    end = answers["long"][3]
    return {
        "turn": {"prompt": turn["greedy"], "max_tokens": 12, "sampling": SHOWN},
        "again": {"prompt": FIRST["long"]["prompt"], "max_tokens": 12, "sampling": SHOWN},
        "turn on a": {"prompt": turn["on a"], "max_tokens": 12, "sampling": SHOWN, "adapter": AdapterRef("a", 1)},
        "turn on b": {"prompt": turn["on b"], "max_tokens": 12, "sampling": SAMPLED, "adapter": AdapterRef("b", 1)},
        "group": {"prompt": [*SYSTEM, 60], "max_tokens": 10, "sampling": SAMPLED, "n": 3},
        "penalties": {"prompt": turn["long"], "max_tokens": 12, "sampling": PENALISED},
        "grammar": {
            "prompt": turn["long"][:-1],
            "max_tokens": 12,
            "sampling": SAMPLED,
            "grammar": Words(tuple(range(20, 40)), tuple(range(60, 80))),
        },
        "stops": {"prompt": FIRST["long"]["prompt"], "stopping": StopParams(12, stop=(f"<{end}>",))},
        "collected": {"prompt": [*SYSTEM, 61], "max_tokens": 9, "sampling": SAMPLED, "collection": CollectionSpec()},
    }


def serve(harness: Harness, requests: dict[str, dict[str, Any]], apart: int = 2) -> None:
    for rid, fields in requests.items():
        harness.submit(rid, **fields)
        harness.step(apart)
    harness.run()


def with_adapters(model: nn.Module, **settings: Any) -> Harness:
    layout = layout_of(tiny_model(model.model_type))  # `model` may have the adapted linears of an earlier harness
    harness = make_harness(model, **settings)
    for seed, name in enumerate("ab", start=1):
        harness.publish(name, random_adapter(layout, seed))
    return harness


@pytest.mark.parametrize(("family", "lookahead"), [*stages(FAMILIES, True), ("llama", False), ("gemma3", False)])
def test_cached_equals_uncached(family: str, lookahead: bool) -> None:
    model = model_of(family)
    uncached = with_adapters(model, keep_prefixes=False)
    serve(uncached, FIRST)
    wave = second_wave({rid: uncached.tokens(rid) for rid in FIRST})
    for rid, fields in wave.items():  # each of them alone
        uncached.answer(rid, **fields)
    cached = with_adapters(model, lookahead=lookahead)
    serve(cached, FIRST)
    serve(cached, wave)
    for rid, fields in {**FIRST, **wave}.items():
        assert_same_answer(cached, uncached, rid, fields.get("n", 1), tolerance(model))
        assert uncached.cached(rid) == 0
    for rid in wave:
        assert cached.cached(rid) >= 2 * BLOCK_TOKENS, rid


@pytest.mark.parametrize(("family", "step"), [("llama", 3), ("gemma2", 7), ("gemma3", 7)])
def test_second_turns_at_every_alignment(family: str, step: int) -> None:
    """All of the first turn but its last token, which was never computed, comes from the cache. Fewer than 8 tokens of
    a block are computed again instead of copied."""
    model = model_of(family)
    harness, history = make_harness(model), text(200, seed=3)
    for extra in range(0, BLOCK_TOKENS, step):
        row = [extra, *history[: 130 + extra]]
        harness.answer(f"first {extra}", row, 5)
        turn = [*row, *harness.tokens(f"first {extra}"), 9, 9]
        harness.answer(f"second {extra}", turn, 4, sampling=SHOWN)
        known = len(row) + 4
        assert harness.cached(f"second {extra}") == known - (known % BLOCK_TOKENS) * (known % BLOCK_TOKENS < 8)
        assert_drawn_by(model, turn, harness.outputs(f"second {extra}"))


# ---- what is not shared ------------------------------------------------------------------------------


def test_different_salts_and_adapters_never_share() -> None:
    harness = with_adapters(tiny_model("llama"))
    row = text(200, seed=5)
    for salt in ("", "x", "y"):
        for adapter in (BASE_ADAPTER, AdapterRef("a", 1), AdapterRef("b", 1)):
            rid = f"{salt} {adapter}"
            harness.answer(rid, row, 4, cache_salt=salt, adapter=adapter)
            assert harness.cached(rid) == 0
            harness.answer(f"{rid} again", row, 4, cache_salt=salt, adapter=adapter)
            assert harness.cached(f"{rid} again") == len(row) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_what_is_not_scored_comes_from_the_cache(family: str, max_tokens: int) -> None:
    """Scores from any token on are those of a whole computation, and only the tokens from the one before are computed.
    A recurrent state is kept at the end of blocks alone."""
    model = model_of(family)
    harness, row = make_harness(model), text(200, seed=6)
    logits = model(mx.array([row]))[0].astype(mx.float32)
    expected = (logits - mx.logsumexp(logits, -1, keepdims=True)).tolist()
    harness.answer("first", row, 4)
    for first in (2, 63, 64, 65, 129, 190, 199, 200, 300):
        for rid in (f"{first}", f"{first} again"):
            before = harness.loop.counters.prefilled_tokens
            harness.answer(rid, row, prompt_logprobs=1, scored_from=first, n=2, stopping=StopParams(max_tokens))
            computed = harness.loop.counters.prefilled_tokens - before
            (scored,) = [e for e in harness.of(rid) if isinstance(e, PromptScored)]
            assert len(scored.logprobs) == len(row)
            assert scored.logprobs[:first] == (None,) * min(first, len(row))
            for at, entry in enumerate(scored.logprobs[first:], first):
                assert entry is not None
                assert entry.logprob == pytest.approx(expected[at - 1][row[at]], rel=1e-5)
            if max_tokens:
                assert harness.tokens(rid, 0) == harness.tokens(rid, 1) == harness.tokens("first")[:max_tokens]
        least = max(0, len(row) - first)
        assert least <= computed <= least + (BLOCK_TOKENS + 16 if family == "qwen3_next" else 8)


def test_a_prompt_that_is_preempted_while_it_is_scored_gets_all_of_its_scores() -> None:
    model = tiny_model("llama")
    row = text(200, seed=6)
    logits = model(mx.array([row]))[0]
    expected = (logits - mx.logsumexp(logits, -1, keepdims=True)).tolist()
    harness = make_harness(model, budget_tokens=448)
    harness.answer("first", row, 4)
    for number in range(3):
        harness.submit(f"grows {number}", text(60, seed=number), 150)
    for number in range(4):
        harness.submit(f"scored {number}", row, 90, prompt_logprobs=0, scored_from=100, n=2)
        harness.loop.step()
    harness.run()
    assert harness.loop.stats().preemptions_total > 0
    for number in range(4):
        (scored,) = [e for e in harness.of(f"scored {number}") if isinstance(e, PromptScored)]
        values = [entry.logprob for entry in scored.logprobs[100:] if entry is not None]
        assert values == pytest.approx([expected[at - 1][row[at]] for at in range(100, 200)], abs=GEMMA)


# ---- groups and preempted rows -----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("lookahead", [True, False])
def test_a_preempted_row_comes_back_through_the_cache(lookahead: bool, n: int) -> None:
    """It computes the tokens that the host did not know, and less than 8 more, also if others of its group live."""
    harness, row = make_harness(lookahead=lookahead), text(200, seed=8)
    harness.submit("r", row, 100, n=n, sampling=PENALISED)
    harness.until(lambda: len(harness.tokens("r")) >= 90)
    before = harness.loop.counters.prefilled_tokens
    harness.loop.scheduler.preempt(harness.loop.scheduler.live[0])
    harness.run()
    assert harness.loop.counters.prefilled_tokens - before <= 10
    assert harness.loop.scheduler.preemptions == 1
    expected = make_harness(keep_prefixes=False)
    expected.answer("r", row, 100, n=n, sampling=PENALISED)
    assert_same_answer(harness, expected, "r", n)
