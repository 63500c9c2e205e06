"""Rows of several adapters in one batch: each must equal its adapter merged into the base and run alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping

import mlx.core as mx
import mlx.nn as nn
import pytest
from harness import TINY, assert_same_tokens, make_harness, solo
from lora import merged

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import PromptScored, RequestFinished, SamplingParams, SequenceOutput


def text(length: int, seed: int) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(2, longest))] for _ in range(count)]


def changed_by(model: Callable[[], nn.Module], adapters: Mapping[str, AdapterWeights], shortest: int) -> Counter[str]:
    """Checks prefill, packed prefill and decode of 12 rows, some of the base and as many of each adapter.

    Args:
        shortest: tokens of the first answer; each has one more than the one before.

    Returns:
        How many rows of each adapter say something else than the base.
    """
    models = {name: merged(model(), weights) for name, weights in adapters.items()} | {"base": model()}
    harness = make_harness(model(), max_rows=6)
    refs = {name: harness.publish(name, weights) for name, weights in adapters.items()} | {"base": BASE_ADAPTER}
    rows = [(name, row) for name, row in zip([*refs] * (12 // len(refs)), prompts(12, 70, seed=3), strict=True)]
    for i, (name, row) in enumerate(rows):
        harness.submit(str(i), row, shortest + i, adapter=refs[name])
        for _ in range(i % 3):
            harness.loop.step()
    harness.run()
    changed = Counter[str]()
    for i, (name, row) in enumerate(rows):
        assert isinstance(harness.terminal(str(i)), RequestFinished)
        assert_same_tokens(harness.tokens(str(i)), solo(models[name], row, shortest + i), TINY)
        changed[name] += harness.tokens(str(i)) != solo(models["base"], row, shortest + i).tokens
    return changed


def assert_logprobs(
    model: Callable[[], nn.Module], adapters: Mapping[str, AdapterWeights], count: int, within: float = TINY
) -> None:
    """Checks the logprobs of prompts and of greedy answers of so many rows, of the base and of each adapter, which are
    computed in the same forward passes: those of each row's own merged model."""
    models = {name: merged(model(), weights) for name, weights in adapters.items()} | {"base": model()}
    harness = make_harness(model())
    refs = {name: harness.publish(name, weights) for name, weights in adapters.items()} | {"base": BASE_ADAPTER}
    rows = list(zip([*refs] * count, prompts(count, 60, seed=8), strict=False))
    sampling = SamplingParams(temperature=0.0, top_logprobs=0)
    for at, (name, row) in enumerate(rows):
        harness.submit(str(at), row, 5, adapter=refs[name], sampling=sampling, prompt_logprobs=0)
    harness.run()
    for at, (name, row) in enumerate(rows):
        events, tokens = harness.of(str(at)), [*row, *harness.tokens(str(at))]
        logits = models[name](mx.array([tokens]))[0].astype(mx.float32)
        expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        (scored,) = [event.logprobs[1:] for event in events if isinstance(event, PromptScored)]
        drawn = [event.logprobs[0] for event in events if isinstance(event, SequenceOutput)]
        want = [expected[place, token].item() for place, token in enumerate(tokens[1:])]
        assert [entry.logprob for entry in (*scored, *drawn)] == pytest.approx(want, abs=within)
