"""Prompts that arrive together and begin with the same text: one computes it, the others take its blocks over."""

from __future__ import annotations

from harness import TINY, assert_same_tokens, make_harness, solo
from tiny import tiny_model

from mlx_parallm.core.requests import RequestFinished

SYSTEM = [(7 * i) % 250 for i in range(400)]


def test_a_text_that_all_have_in_common_is_computed_once() -> None:
    model = tiny_model("llama")
    harness = make_harness(model)
    asked = {str(user): [*SYSTEM, 250 - user, *range(20)] for user in range(6)}
    for name, prompt in asked.items():
        harness.submit(name, prompt, 8)
    harness.run()
    for name, prompt in asked.items():
        assert_same_tokens(harness.tokens(name), solo(model, prompt, 8), TINY)
    apart = sum(len(prompt) - 384 for prompt in asked.values())
    assert harness.loop.counters.prefilled_tokens <= 384 + 64 + apart
    ends = [harness.terminal(name) for name in asked]
    assert sorted(end.cached_tokens for end in ends if isinstance(end, RequestFinished)) == [0, *[384] * 5]


def test_one_that_is_preempted_leaves_the_others_to_go_on() -> None:
    model = tiny_model("llama")
    harness = make_harness(model, budget_tokens=20 * 64)
    prompts = {str(user): [*SYSTEM, user] for user in range(4)}
    for name, prompt in prompts.items():
        harness.submit(name, prompt, 30)
    harness.step(3)
    harness.loop.abort("0")
    harness.run()
    for name in ("1", "2", "3"):
        assert_same_tokens(harness.tokens(name), solo(model, prompts[name], 30), TINY)
