"""A prediction head proposes tokens from the base model's hidden states, and changes nothing but how fast they come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from harness import Harness, assert_same_tokens, make_harness, solo
from heads import Reference, head_config, save_with_head
from lora import layout_of, random_adapter
from word_grammar import END, Words

from mlx_parallm.batch.runner import Pending
from mlx_parallm.core.requests import RequestFailed, SamplingParams
from mlx_parallm.engine.draft_head import DraftHead
from mlx_parallm.model.mtp import PredictionHead, load_head
from mlx_parallm.model.split import trunk_of

PROMPT = [i * i % 251 for i in range(40)]


def loaded(folder: Path, family: str = "glm4_moe", right: bool = False) -> tuple[Reference, PredictionHead]:
    """A tiny model without experts, whose choice amplifies rounding, and its head."""
    config = head_config(family, n_routed_experts=None)
    reference = save_with_head(config, folder, right=right)
    head = load_head(reference.model, folder, config)
    assert head is not None
    return reference, head


def drafts_of(harness: Harness) -> list[tuple[list[int], int, list[int]]]:
    """Records each draft that the head makes: the tokens before it, where its row begins, and the draft."""
    model, found = harness.loop.draft_model, []
    assert isinstance(model, DraftHead)
    run = model._run

    def recorded(rows: Sequence[Any], counts: Sequence[int]) -> None:
        run(rows, counts)
        found.extend((list(row.sequence.tokens), row.start, list(row.draft)) for row in rows)

    model._run = recorded  # type: ignore[method-assign]
    return found


def expected_draft(reference: Reference, tokens: list[int], start: int, count: int) -> list[int]:
    """By the formula: all pairs of a token and the hidden state before it from `start` on, then the head's own."""
    hidden = trunk_of(reference.model)(mx.array([tokens]))[0, start - 1 : -1]
    own, draft = tokens[start:], []
    for _ in range(count):
        outputs, logits = reference.step(own, hidden)
        draft.append(int(logits[-1].argmax().item()))
        own = [*own, draft[-1]]
        hidden = mx.concatenate([hidden, outputs[-1:]])
    return draft


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_5"])
def test_drafts_are_those_of_the_formula(family: str, lookahead: bool, tmp_path: Path) -> None:
    """Of several rows, whose prompts are longer than a chunk, or than what is kept of hidden states."""
    reference, head = loaded(tmp_path, family)
    lengths = (3, 40, 700)
    harness = make_harness(reference.model, draft=head, lookahead=lookahead)
    made = drafts_of(harness)
    for length in lengths:
        harness.submit(f"{length}", (PROMPT * 20)[:length], 20)
    harness.run()
    for length in lengths:
        expected = solo(reference.model, (PROMPT * 20)[:length], 20)
        assert_same_tokens(harness.tokens(f"{length}"), expected, 1e-5)
    assert len(made) > 3
    assert {start for _, start, _ in made} >= {1}
    assert max(start for _, start, _ in made) > 100, "not all of the long prompt is kept"
    for tokens, start, draft in made:
        assert draft == expected_draft(reference, tokens, start, len(draft))
    assert harness.loop.draft_model.bytes_held == 0


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5"])
def test_a_head_that_is_right_saves_passes(family: str, tmp_path: Path) -> None:
    reference, head = loaded(tmp_path, family, right=True)
    harness = make_harness(reference.model, draft=head, lookahead=False)
    harness.submit("long", PROMPT, 40)
    harness.submit("short", PROMPT[:5], 40)
    harness.run()
    assert_same_tokens(harness.tokens("long"), solo(reference.model, PROMPT, 40), 1e-5)
    counters = harness.loop.counters
    assert counters.accepted.total() == counters.drafted.total() > 60
    assert counters.steps < 20, "two rows of 40 tokens"


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize(("family", "lookahead"), [("glm4_moe", False), ("glm4_moe", True), ("qwen3_5", False)])
def test_texts_are_the_same_with_and_without_a_head(family: str, lookahead: bool, right: bool, tmp_path: Path) -> None:
    """Greedy and sampled, of several samples, with grammars and penalties, with adapters and without, in one batch."""
    reference, head = loaded(tmp_path, family, right=right)
    weights = random_adapter(layout_of(reference.model), seed=3, size=0.03)
    found = []
    for draft in (None, head):
        harness = make_harness(reference.model, draft=draft, lookahead=lookahead, max_rows=6, eos_ids=(END,))
        ref = harness.publish("a", weights)
        for number in range(10):
            grammar = Words(*[tuple(range(20, 30 + each)) for each in range(3)]) if number % 5 == 0 else None
            sampling = SamplingParams(temperature=0.4 * (number % 3), seed=number, presence_penalty=0.1 * (number % 2))
            version = {"adapter": ref} if number % 4 == 3 else {}
            fields = {"sampling": sampling, "grammar": grammar, "n": 1 + number % 2, **version}
            harness.submit(f"{number}", PROMPT[number:] * (1 + number % 3), 5 + 3 * number, **fields)
            harness.step(number % 4)
        harness.run()
        found.append([harness.tokens(f"{number}", index) for number in range(10) for index in range(1 + number % 2)])
        assert (harness.loop.counters.drafted.total() > 10) == (draft is not None)
    assert found[0] == found[1]


def test_drafts_go_on_after_a_preemption_and_a_cached_prefix(tmp_path: Path) -> None:
    """The hidden states of cached tokens are not known, so a row of the head begins after them."""
    reference, head = loaded(tmp_path, right=True)
    harness = make_harness(reference.model, draft=head, lookahead=False, budget_tokens=7 * 64, max_rows=3)
    made = drafts_of(harness)
    for number in range(3):
        harness.submit(f"{number}", PROMPT[number:], 120)
    harness.run()
    assert harness.loop.scheduler.preemptions > 0
    for number in range(3):
        assert_same_tokens(harness.tokens(f"{number}"), solo(reference.model, PROMPT[number:], 120), 1e-5)
    made.clear()
    before = harness.loop.counters.accepted.total()
    follow_up = PROMPT + harness.tokens("0")
    harness.answer("again", follow_up, 20)
    assert harness.cached("again") >= 64
    assert min(start for _, start, _ in made) > 64
    assert harness.loop.counters.accepted.total() > before
    assert_same_tokens(harness.tokens("again"), solo(reference.model, follow_up, 20), 1e-5)


def test_a_fault_of_a_unit_forgets_hidden_states_that_may_be_wrong(tmp_path: Path) -> None:
    reference, head = loaded(tmp_path, right=True)
    harness = make_harness(reference.model, draft=head, lookahead=False)
    harness.submit("row", PROMPT, 60)
    harness.until(lambda: len(harness.tokens("row")) > 10)
    sample = harness.runner.sample

    def fails(pending: Pending) -> None:
        harness.runner.sample = sample  # type: ignore[method-assign]
        raise RuntimeError("injected")

    harness.runner.sample = fails  # type: ignore[method-assign,assignment]
    harness.step()
    assert harness.runner.hidden.nbytes == 0
    harness.run()
    assert isinstance(harness.terminal("row"), RequestFailed)
    before = harness.loop.counters.accepted.total()
    assert_same_tokens(harness.answer("next", PROMPT, 60), solo(reference.model, PROMPT, 60), 1e-5)
    assert harness.loop.counters.accepted.total() > before + 30


def test_an_aborted_row_leaves_nothing_of_the_head(tmp_path: Path) -> None:
    reference, head = loaded(tmp_path, right=True)
    harness = make_harness(reference.model, draft=head, lookahead=False)
    harness.submit("gone", PROMPT, 90)
    harness.until(lambda: len(harness.tokens("gone")) > 8)
    assert harness.loop.draft_model.bytes_held > 0
    harness.loop.abort("gone")
    harness.run()
    assert harness.loop.draft_model.bytes_held == 0
