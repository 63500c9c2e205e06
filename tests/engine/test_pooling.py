"""Pooled hidden states: what mlx-lm's own model computes for each text alone, in any mixture with rows that decode."""

from __future__ import annotations

import random

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from family_checks import build
from harness import TINY, Harness, assert_same_tokens, make_harness, solo
from hypothesis import given, settings
from hypothesis import strategies as st
from lora import layout_of, merged, random_adapter
from tiny import FAMILIES, stages, tiny_model

from mlx_parallm.core.requests import (
    GenerationRequest,
    Pooling,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    SequencePooled,
    StopParams,
)
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.model.split import trunk_of

Ids = tuple[int, ...]


def texts(count: int, longest: int, seed: int = 0) -> list[Ids]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(256) for _ in range(rng.randint(1, longest))) for _ in range(count)]


def reference(model: nn.Module, ids: Ids, pooling: Pooling) -> np.ndarray:
    """By mlx-lm's model file, without a cache: the trunk over the whole text at once."""
    hidden = trunk_of(model)(mx.array([ids]), cache=None)[0].astype(mx.float32)
    return np.array(hidden[-1] if pooling is Pooling.LAST else hidden.mean(axis=0))


def embed(harness: Harness, request_id: str, prompts: list[Ids], pooling: Pooling, **fields: object) -> None:
    harness.loop.submit(
        GenerationRequest(
            request_id, tuple(prompts), SamplingParams(), StopParams(max_tokens=0), pooling=pooling, **fields
        )
    )


def vectors(harness: Harness, request_id: str) -> list[np.ndarray]:
    events = [event for event in harness.of(request_id) if isinstance(event, SequencePooled)]
    return [np.frombuffer(event.vector, "<f4") for event in sorted(events, key=lambda event: event.index)]


def assert_close(got: np.ndarray, expected: np.ndarray, bound: float = TINY) -> None:
    """Compared as clients get them, at length 1."""
    assert np.abs(got / np.linalg.norm(got) - expected / np.linalg.norm(expected)).max() < bound


@pytest.mark.parametrize("family", stages(FAMILIES))
@pytest.mark.parametrize("pooling", Pooling)
def test_each_family_gives_the_states_of_its_own_model_file(family: str, pooling: Pooling) -> None:
    model = tiny_model(family)
    prompts = texts(5, 90)
    expected = [reference(model, ids, pooling) for ids in prompts]
    harness = make_harness(model)
    harness.submit("decodes", prompts[0], 12)
    embed(harness, "vectors", prompts, pooling)
    harness.run()
    for got, alone in zip(vectors(harness, "vectors"), expected, strict=True):
        assert_close(got, alone)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def cases(llama: nn.Module) -> list[tuple[Ids, dict[Pooling, np.ndarray]]]:
    return [(ids, {each: reference(llama, ids, each) for each in Pooling}) for ids in texts(10, 150, seed=1)]


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_interleaving_with_rows_that_decode(llama: nn.Module, cases: list, data: st.DataObject) -> None:
    """In a pool too small for all, with aborts: vectors and tokens are those of solo runs, and nothing is left."""
    harness = make_harness(llama, budget_tokens=data.draw(st.sampled_from([256, 600, 4000])), max_rows=5)
    aborted, asked = set(), {}
    for i, (ids, expected) in enumerate(cases):
        kind = data.draw(st.sampled_from(["tokens", *Pooling]), label="kind")
        if kind == "tokens":
            harness.submit(str(i), ids, 12)
        else:
            asked[str(i)] = expected[kind]
            embed(harness, str(i), [ids], kind)
        harness.step(data.draw(st.integers(0, 5), label="steps"))
        if data.draw(st.integers(0, 5), label="abort") == 0:
            aborted.add(victim := str(data.draw(st.integers(0, i))))
            harness.loop.abort(victim)
            harness.loop.check_integrity()
    harness.run()
    assert harness.runner.cache.bytes_used == 0
    for i, (ids, _) in enumerate(cases):
        if str(i) in aborted:
            continue
        finished = harness.terminal(str(i))
        assert isinstance(finished, RequestFinished)
        if str(i) in asked:
            assert_close(*vectors(harness, str(i)), asked[str(i)])
            assert (finished.completion_tokens, finished.prompt_tokens) == (0, len(ids))
        else:
            assert_same_tokens(harness.tokens(str(i)), solo(llama, ids, 12), TINY)


def test_adapters_change_the_vectors(llama: nn.Module) -> None:
    weights = random_adapter(layout_of(tiny_model("llama")), seed=3)
    harness = make_harness(tiny_model("llama"))
    ref = harness.publish("tone", weights)
    prompts = texts(4, 60, seed=4)
    embed(harness, "base", prompts, Pooling.LAST)
    embed(harness, "tone", prompts, Pooling.MEAN, adapter=ref)
    harness.run()
    adapted = merged(tiny_model("llama"), weights)
    for ids, base, tone in zip(prompts, vectors(harness, "base"), vectors(harness, "tone"), strict=True):
        assert_close(base, reference(llama, ids, Pooling.LAST))
        assert_close(tone, reference(adapted, ids, Pooling.MEAN))


@pytest.mark.parametrize(("pooling", "cached"), [(Pooling.LAST, 128), (Pooling.MEAN, 0)])
def test_only_the_mean_needs_every_token_computed(llama: nn.Module, pooling: Pooling, cached: int) -> None:
    """The beginning is cached: the last token's state is the same with it, the mean is computed without it."""
    start = texts(1, 1, seed=5)[0] * 130
    harness = make_harness(llama, max_batched_tokens=512)
    harness.answer("chat", start, 1)
    ids = (*start, 7, 8, 9)
    embed(harness, "vectors", [ids], pooling)
    harness.run()
    assert_close(*vectors(harness, "vectors"), reference(llama, ids, pooling))
    assert harness.terminal("vectors").cached_tokens // 64 * 64 == cached


def test_a_model_without_a_trunk_refuses_by_name() -> None:
    harness = make_harness(build("ours phixtral"))
    embed(harness, "vectors", texts(2, 5), Pooling.LAST)
    failed = harness.terminal("vectors")
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, InvalidRequestError)
    assert failed.error.param == "model"
    harness.loop.check_integrity()


def test_a_text_may_fill_the_whole_context(llama: nn.Module) -> None:
    ids = texts(1, 1, seed=7)[0] * 128
    harness = make_harness(llama, max_length=128)
    embed(harness, "fits", [ids], Pooling.LAST)
    harness.run()
    assert_close(*vectors(harness, "fits"), reference(llama, ids, Pooling.LAST))
