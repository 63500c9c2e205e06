"""Models whose caches are of a class of their own: rows equal their solo runs, and the pool counts what they hold."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from harness import TINY, Harness, assert_same_tokens, make_harness, solo
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.llama import Model
from tiny import tiny_model

from mlx_parallm.core.requests import RequestFinished
from mlx_parallm.engine.model_check import check_built
from mlx_parallm.kv.states import StateArena
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.layer_state import arrays_of


class OwnCache:
    """Keeps its arrays in a list that it changes, and knows its length as a plain number."""

    def __init__(self) -> None:
        self.state: list[mx.array] = []
        self.offset = 0

    def update_and_fetch(self, *new: mx.array) -> list[mx.array]:
        kept = [mx.concatenate(each, axis=2) for each in zip(self.state, new, strict=True)] if self.state else new
        self.state[:] = kept
        self.offset += new[0].shape[2]
        return self.state

    def make_mask(self, tokens: int, **_: Any) -> mx.array | None:
        return create_causal_mask(tokens, self.offset) if tokens > 1 else None


@pytest.fixture(autouse=True)
def _own_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "make_cache", lambda self: [OwnCache() for _ in self.layers], raising=False)


@pytest.fixture
def model() -> nn.Module:
    return tiny_model("llama")


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def kept(harness: Harness) -> list[list[mx.array]]:
    """The arrays of all caches that the pool keeps, by row."""
    states = harness.runner.cache.states
    assert states is not None
    batches = [held.batch for held in states.arena._held if held is not None]
    return [[array for (cache,) in batch.layers for array in arrays_of(cache)] for batch in batches]


def test_samples_of_a_prompt_are_those_of_the_model_alone(model: nn.Module) -> None:
    harness, prompt = make_harness(model), text(150, seed=1)
    harness.answer("group", prompt, 6, n=4)
    for index in range(4):
        assert_same_tokens(harness.tokens("group", index), solo(model, prompt, 6), TINY)


def test_the_pool_counts_what_the_caches_hold(model: nn.Module) -> None:
    """Rows join and leave."""
    harness, compared = make_harness(model, max_rows=4), 0
    cache = harness.runner.cache

    def compare() -> None:
        nonlocal compared
        held = kept(harness)
        if held and len(held) == len(list(cache.rows)) and all(row.computed > 256 for row in list(cache.rows)):
            compared += 1
            nbytes = sum(array.nbytes for arrays in held for array in arrays)
            assert nbytes <= cache.bytes_used <= 1.3 * nbytes

    for number in range(8):
        harness.submit(str(number), text(300 + 20 * number, number), 10 + 5 * number)
    harness.run(compare)
    assert compared > 20
    assert cache.bytes_used == 0


@pytest.mark.parametrize("call", ["read", "add"])
def test_a_pass_that_fails_leaves_no_row_with_a_changed_cache(
    model: nn.Module, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, whole, calls = make_harness(model), getattr(StateArena, call), 0

    def faulty(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error")
        return whole(*args)

    monkeypatch.setattr(StateArena, call, faulty)
    for number in range(6):
        harness.submit(str(number), text(70, number), 6)
        harness.step(3)
    harness.run()
    assert calls > 9
    ended = [number for number in range(6) if isinstance(harness.terminal(str(number)), RequestFinished)]
    assert ended
    for number in ended:
        assert_same_tokens(harness.tokens(str(number)), solo(model, text(70, number), 6), TINY)


def test_what_such_a_model_lacks_is_off_or_refused_with_the_reason(model: nn.Module) -> None:
    harness, prompt = make_harness(model), text(150, seed=3)
    for name in "ab":
        harness.answer(name, prompt, 3)
    end = harness.terminal("b")
    assert isinstance(end, RequestFinished)
    assert end.cached_tokens == 0
    layout = prepare(model).layout
    assert not layout.takes_drafts


def test_its_check_says_what_is_right_and_what_cannot_be_done() -> None:
    verdict = check_built(tiny_model("llama"))
    assert verdict.compatible
    assert (verdict.of("batch").problem, verdict.of("adapters").problem) == ("", "")
    assert "a class of its own" in verdict.of("prefix cache").problem
    assert "served and not trained: its caches are of a class of its own" in verdict.of("gradients").problem
