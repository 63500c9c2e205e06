"""Invariant 8 on the bundled model: a mixed batch's logprobs against plain forwards, to 1e-4."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from harness import Harness, make_harness

from mlx_parallm.core.requests import PromptScored, SamplingParams, SequenceOutput
from mlx_parallm.model.manager import SharedModelManager

pytestmark = pytest.mark.ci

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who had never",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4,",
    "Water boils at",
    "In 1969, two astronauts walked on the surface of the Moon for the first time in history. " * 4,
)
BUNDLED = 1e-4


@pytest.fixture(scope="module")
def manager() -> SharedModelManager:
    return SharedModelManager(progress=False)


@pytest.fixture(scope="module")
def batch(manager: SharedModelManager) -> Harness:
    """Greedy and sampled rows of different lengths, joined one after another, with all logprobs."""
    harness = make_harness(manager.model)
    for i, text in enumerate(TEXTS):
        sampling = SamplingParams(temperature=0.9 * (i % 2), seed=i, top_logprobs=0)
        harness.submit(str(i), manager.tokenizer.encode(text), 10, sampling=sampling, prompt_logprobs=0)
        harness.loop.step()
    harness.run()
    return harness


def logprobs_of(model: nn.Module, tokens: list[int]) -> list[float]:
    """Of each token after the first, by one plain forward; normalised in float64."""
    logits = np.array(model(mx.array([tokens]))[0, :-1]).astype(np.float64)
    normalised = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return normalised[np.arange(len(tokens) - 1), tokens[1:]].tolist()


@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_prompt_and_drawn_logprobs_equal_a_plain_forward(
    manager: SharedModelManager, batch: Harness, index: int
) -> None:
    prompt = manager.tokenizer.encode(TEXTS[index])
    events = batch.of(str(index))
    scored = next(e for e in events if isinstance(e, PromptScored))
    drawn = [e.logprobs[0].logprob for e in events if isinstance(e, SequenceOutput)]
    got = [entry.logprob for entry in scored.logprobs[1:] if entry is not None] + drawn
    expected = logprobs_of(manager.model, prompt + batch.tokens(str(index)))
    assert len(drawn) == 10
    assert got == pytest.approx(expected, abs=BUNDLED)
