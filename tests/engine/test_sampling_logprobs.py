"""What a collected request's tokens were drawn with: each one's logprob under the distribution that drew it."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import pytest
from harness import TINY, Harness, make_harness
from lora import layout_of, merged, random_adapter
from mixed_batch import text as prompt
from tiny import VOCAB_SIZE, tiny_model

from mlx_parallm.core.requests import CollectionSpec, RequestFinished, SamplingParams, SequenceOutput, WorkClass

COLLECTED = CollectionSpec()


def outputs(harness: Harness, request_id: str, index: int = 0) -> list[SequenceOutput]:
    assert isinstance(harness.terminal(request_id), RequestFinished)
    return harness.outputs(request_id, index)


def assert_drawn_by(
    model: nn.Module,
    harness: Harness,
    request_id: str,
    row: list[int],
    temperature: float,
    index: int = 0,
    allowed: Sequence[int] = range(VOCAB_SIZE),
) -> None:
    """Every token has the logprob that one plain forward over the whole sequence gives it, at `temperature` and among
    the tokens that are `allowed`."""
    got = outputs(harness, request_id, index)
    tokens = harness.tokens(request_id, index)
    logits = model(mx.array([row + tokens[:-1]]))[0, len(row) - 1 :] / temperature
    logits = mx.where(mx.array([token in allowed for token in range(VOCAB_SIZE)]), logits, -mx.inf)
    expected = logits - mx.logsumexp(logits, -1, keepdims=True)
    assert [len(output.sampling_logprobs) for output in got] == [len(output.token_ids) for output in got]
    for at, value in enumerate(value for output in got for value in output.sampling_logprobs):
        assert value == pytest.approx(expected[at, tokens[at]].item(), abs=TINY / temperature)


@pytest.mark.parametrize("budget_tokens", [1 << 20, 5 * 64])
def test_they_equal_a_plain_forward_whoever_is_beside_them(budget_tokens: int) -> None:
    """A group of four and a single row, collected; greedy and sampled rows, one with logprobs, that are not. In a
    small pool rows are preempted and computed again."""
    group, single = prompt(50, 1), prompt(40, 2)
    harness = make_harness(budget_tokens=budget_tokens)
    sampled = SamplingParams(temperature=0.7, seed=5)
    harness.submit("greedy", prompt(25, 3), 30)
    harness.submit("group", group, 24, n=4, sampling=sampled, collection=COLLECTED)
    harness.submit("sampled", prompt(10, 4), 30, sampling=SamplingParams(temperature=1.4, top_p=0.8, seed=9))
    harness.submit("raw", prompt(12, 5), 20, sampling=SamplingParams(temperature=0.7, seed=2, top_logprobs=2))
    harness.submit("single", single, 40, sampling=sampled, collection=COLLECTED)
    harness.run()
    assert (harness.loop.stats().preemptions_total > 0) == (budget_tokens < 1000)
    model = tiny_model("llama")
    for index in range(4):
        assert_drawn_by(model, harness, "group", group, 0.7, index)
    assert_drawn_by(model, harness, "single", single, 0.7)
    for other in ("greedy", "sampled", "raw"):
        assert all(output.sampling_logprobs == () for output in outputs(harness, other))


def test_they_are_of_the_adapter_that_drew() -> None:
    row = prompt(20, 6)
    weights = random_adapter(layout_of(tiny_model("llama")), 1)
    harness = make_harness()
    ref = harness.publish("policy", weights)
    sampling = SamplingParams(temperature=1.0, seed=3)
    harness.submit("base", row, 16, sampling=sampling, collection=COLLECTED)
    harness.submit("policy", row, 16, sampling=sampling, collection=COLLECTED, adapter=ref)
    harness.run()
    assert_drawn_by(tiny_model("llama"), harness, "base", row, 1.0)
    assert_drawn_by(merged(tiny_model("llama"), weights), harness, "policy", row, 1.0)


def test_raw_and_sampling_logprobs_are_not_mixed_up() -> None:
    row = prompt(20, 7)
    harness = make_harness()
    sampling = SamplingParams(temperature=0.7, seed=3, top_logprobs=0)
    harness.answer("both", row, 16, sampling=sampling, collection=COLLECTED)
    model, tokens = tiny_model("llama"), harness.tokens("both")
    logits = model(mx.array([row + tokens[:-1]]))[0, len(row) - 1 :]
    raw = logits - mx.logsumexp(logits, -1, keepdims=True)
    for at, output in enumerate(outputs(harness, "both")):
        assert output.logprobs[0].logprob == pytest.approx(raw[at, tokens[at]].item(), abs=TINY)
    assert_drawn_by(model, harness, "both", row, 0.7)


@pytest.mark.parametrize("work_class", WorkClass)
def test_collection_asks_for_them_and_the_work_class_does_not(work_class: WorkClass) -> None:
    """And asking changes no token."""
    harness = make_harness()
    sampling = SamplingParams(temperature=1.0, seed=8)
    for request_id, collection in (("kept", COLLECTED), ("not kept", None)):
        harness.submit(request_id, [1, 2, 3], 8, sampling=sampling, collection=collection, work_class=work_class)
    harness.run()
    assert [len(output.sampling_logprobs) for output in outputs(harness, "kept")] == [1] * 8
    assert [len(output.sampling_logprobs) for output in outputs(harness, "not kept")] == [0] * 8
    assert harness.tokens("kept") == harness.tokens("not kept")


@pytest.mark.parametrize("source", ["text", "draft model"])
def test_they_equal_a_plain_forward_whatever_guessed_the_tokens(source: str) -> None:
    """Rollouts of a group and a single one."""
    model, row = tiny_model("llama"), prompt(6, 1) * 8
    draft = tiny_model("llama") if source == "draft model" else None
    allowed = range(VOCAB_SIZE) if draft is not None else (3, 7, 9, 40, 80)  # a text of few tokens repeats itself
    mask = bytes(sum(1 << i % 8 for i in allowed if i // 8 == byte) for byte in range(-(-VOCAB_SIZE // 8)))
    harness = make_harness(model, draft=draft, speculates=draft is None, lookahead=False)
    temperatures = {"group": 0.2, "single": 0.7}
    for name, temperature in temperatures.items():
        sampling = SamplingParams(temperature=temperature, seed=4, allowed_tokens=mask)
        fields = {"collection": COLLECTED, "work_class": WorkClass.TRAINING, "sampling": sampling}
        harness.submit(name, row, 40, n=3 if name == "group" else 1, **fields)
    harness.run()
    assert harness.loop.counters.accepted.total() > 3
    assert harness.loop.counters.drafted.total() > harness.loop.counters.accepted.total()
    for index in range(3):
        assert_drawn_by(model, harness, "group", row, temperatures["group"], index, allowed)
    assert_drawn_by(model, harness, "single", row, temperatures["single"], allowed=allowed)
