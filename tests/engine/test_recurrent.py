"""Models with recurrent layers: rows equal their solo runs, however they are batched, cut, cached and preempted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from harness import TINY, Harness, Solo, assert_same_tokens, assert_solo, make_harness, solo
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_batch import text
from tiny import RECURRENT, tiny_model

from mlx_parallm.core.requests import RequestFinished, SamplingParams
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.kv.blocks import BLOCK_TOKENS, FREED
from mlx_parallm.kv.device_memory import MemoryAccount
from mlx_parallm.model.cache_plan import prepare

FAMILIES = [each if each in ("lfm2", "mamba") else pytest.param(each, marks=pytest.mark.slow) for each in RECURRENT]
"""In the first stage, one with attention beside its recurrent layers, and one without."""


class World:
    """A model and what it answers alone."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.model = tiny_model(family)
        self.rows = [text(length, seed) for seed, length in enumerate((1, 150, 20, 70, 129, 64, 3, 90))]
        self.alone = [solo(self.model, row, 20) for row in self.rows]


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def answer(harness: Harness, name: str, prompt: Sequence[int], tokens: int = 4, **fields: Any) -> int:
    """Submits a request and runs it to its end. Returns how many tokens of its prompt were cached."""
    harness.answer(name, prompt, tokens, **fields)
    return harness.cached(name)


# ---- batches ---------------------------------------------------------------------------------------


def test_only_the_mixers_of_recurrent_layers_run_row_by_row() -> None:
    """All else of a layer, such as its experts, computes the tokens of all rows together."""
    assert prepare(tiny_model("qwen3_next")).mixers == ("model.layers.0.linear_attn",)


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_any_interleaving_with_aborts_and_preemption(world: World, data: st.DataObject) -> None:
    """A pool too small for all makes rows preempt and go on from what is left; nobody's tokens change, nobody fails."""
    harness = make_harness(
        world.model,
        budget_tokens=data.draw(st.sampled_from([256, 600, 2000]), label="tokens"),
        states=data.draw(st.sampled_from([1, 5, 40]), label="states"),
        max_rows=5,
        control_ids=data.draw(st.sampled_from([(), range(0, 256, 16)]), label="tokens that end messages"),
        lookahead=data.draw(st.booleans(), label="lookahead"),
        speculates=data.draw(st.booleans(), label="speculates"),
    )
    aborted = set()
    for i, row in enumerate(world.rows):
        harness.submit(str(i), row, data.draw(st.integers(1, 20), label="max_tokens"))
        harness.step(data.draw(st.integers(0, 5), label="steps"))
        if data.draw(st.integers(0, 4), label="abort") == 0:
            aborted.add(victim := str(data.draw(st.integers(0, i))))
            harness.loop.abort(victim)
    harness.run()
    assert harness.runner.cache.bytes_used == 0
    for i, reference in enumerate(world.alone):
        got = harness.tokens(str(i))
        assert_same_tokens(got, Solo(reference.tokens[: len(got)], reference.gaps[: len(got)]), TINY)
        if str(i) not in aborted:
            assert isinstance(harness.terminal(str(i)), RequestFinished)


def test_half_precision_states_keep_their_types(world: World) -> None:
    model = tiny_model(world.family, mlp_only_layers=[0, 1])  # MLX's CPU has no experts in half precision
    model.set_dtype(mx.bfloat16)
    layout = prepare(model).layout
    assert layout.dtype == mx.bfloat16
    harness = make_harness(model)
    harness.submit_all(world.rows[:3], 4, sampling=SamplingParams(temperature=0.0, top_logprobs=0))
    harness.run()
    assert all(isinstance(harness.terminal(str(i)), RequestFinished) for i in range(3))
    states = harness.runner.cache.states
    assert states is not None
    dtypes = {dtype for spec in layout.recurrent.values() for dtype in spec.dtypes}
    assert {array.dtype for array in states.arena.arrays()} == dtypes


# ---- the prefix cache ------------------------------------------------------------------------------


def test_a_prompt_and_what_follows_it_are_found_at_its_last_full_block(world: World) -> None:
    harness, row = make_harness(world.model), world.rows[1]
    assert answer(harness, "first", row) == 0
    assert answer(harness, "again", row) == 2 * BLOCK_TOKENS
    assert harness.tokens("again") == harness.tokens("first")
    turn = [*row, *harness.tokens("first"), 7, 8, 9]
    assert answer(harness, "turn", turn) == 2 * BLOCK_TOKENS
    assert_same_tokens(harness.tokens("turn"), solo(world.model, turn, 4), TINY)


def test_an_answer_is_found_at_the_last_block_that_it_filled(world: World) -> None:
    harness, row = make_harness(world.model), world.rows[3]
    answer(harness, "first", row, 130)
    turn = [*row, *harness.tokens("first"), 7, 8, 9]
    assert answer(harness, "turn", turn) == 3 * BLOCK_TOKENS
    assert_same_tokens(harness.tokens("turn"), solo(world.model, turn, 4), TINY)
    states = harness.runner.cache.states
    assert states is not None
    assert states.allocator.cached == 2, "of the prompt and the answer: the one after two blocks made room for the next"


END = 256
"""A token that no text has, which ends a message."""


def chats(system: Sequence[int], count: int) -> list[list[int]]:
    """Prompts with one system prompt and different questions."""
    return [[*system, END, *text(80, seed=20 + number)] for number in range(count)]


@pytest.mark.parametrize("chunk", [50, 512])
def test_the_second_prompt_finds_the_first_message_of_a_chat(world: World, chunk: int) -> None:
    harness = make_harness(world.model, max_batched_tokens=chunk, control_ids={END})
    prompts = chats([END, *text(200, seed=9)], 2)
    assert [answer(harness, str(number), row) for number, row in enumerate(prompts)] == [0, 3 * BLOCK_TOKENS]
    assert harness.runner.cache.hits == 3 * BLOCK_TOKENS
    assert_solo(harness, world.model, prompts, 4)


@pytest.mark.parametrize(("shared", "second"), [(255, 0), (300, 256), (500, 256), (530, 512)])
def test_the_second_prompt_finds_half_of_what_it_shares_and_the_third_one_all(
    world: World, shared: int, second: int
) -> None:
    """The second one makes a checkpoint where they part, because only then this is known."""
    harness, prompts = make_harness(world.model, max_batched_tokens=512), chats(text(shared - 1, seed=9), 3)
    all_blocks = shared // BLOCK_TOKENS * BLOCK_TOKENS
    assert [answer(harness, str(number), row) for number, row in enumerate(prompts)] == [0, second, all_blocks]
    assert second > all_blocks // 2 or shared < 256
    assert_solo(harness, world.model, prompts, 4)


def test_of_two_chats_at_once_one_computes_what_they_share(world: World) -> None:
    harness = make_harness(world.model, max_batched_tokens=512, control_ids={END})
    prompts = chats([END, *text(200, seed=9)], 2)
    harness.submit_all(prompts, 4)
    harness.run()
    assert harness.loop.counters.prefilled_tokens == sum(map(len, prompts)) - 3 * BLOCK_TOKENS
    assert_solo(harness, world.model, prompts, 4)


def test_what_many_prompts_leave_for_others_stays_small_and_drives_out_nothing_in_use(world: World) -> None:
    """50 prompts, each with a system prompt of its own, and a chat that goes on between them."""
    harness = make_harness(world.model, states=16, max_batched_tokens=512, budget_tokens=4096, control_ids={END})
    cache, most = harness.runner.cache, 0
    assert cache.states is not None
    answer(harness, "chat", chat := text(140, seed=1))
    for number in range(50):
        (prompt,) = chats([END, *text(600, seed=100 + number)], 1)
        assert answer(harness, str(number), prompt, 2) == 0
        held = sum(node.block_ids[-1] != FREED for node in cache.checkpoints.tentative)
        most = max(most, held)
        assert held * cache.states.arena.block_bytes <= cache.device.budget_bytes / 8
        harness.loop.check_integrity()
        if number % 3 == 0:
            assert answer(harness, f"chat {number}", chat) == 2 * BLOCK_TOKENS
    assert most > 1
    assert_same_tokens(harness.tokens("49"), solo(world.model, prompt, 2), TINY)


def test_a_prompt_ends_although_adapters_and_training_hold_more_than_the_budget(world: World) -> None:
    """They have grown since the row began, so there may be no tentative checkpoint any more."""
    harness = make_harness(world.model)
    harness.submit("a", text(700, 1), 4)
    harness.until(lambda: harness.loop.scheduler.live[:1])
    harness.runner.cache.device.open_account(
        MemoryAccount.OPTIMIZER, lambda: 2 * harness.runner.cache.device.budget_bytes
    )
    while harness.loop.step():
        pass
    assert isinstance(harness.terminal("a"), RequestFinished)
    assert harness.loop.counters.failed_steps == 0


def test_samples_of_a_prompt_go_on_from_its_last_full_block(world: World) -> None:
    harness, row = make_harness(world.model), world.rows[1]
    harness.answer("group", row, 6, n=4)
    for index in range(4):
        assert_same_tokens(harness.tokens("group", index), solo(world.model, row, 6), TINY)
    rest = len(row) - 2 * BLOCK_TOKENS
    assert harness.loop.counters.prefilled_tokens == len(row) + 3 * rest


# ---- faults ----------------------------------------------------------------------------------------


# ---- limits ----------------------------------------------------------------------------------------


def test_without_keys_and_values_there_is_nothing_to_quantize() -> None:
    with pytest.raises(UnsupportedModelError, match=r"--kv-bits 8 .* recurrent"):
        prepare(tiny_model("mamba")).layout.quantized(8)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_keys_and_values_beside_states_may_be_quantized(family: str) -> None:
    """A row that is computed in one chunk, and one that is cut and goes on from a checkpoint."""
    model, row = tiny_model(family, num_attention_heads=2, head_dim=32), text(200, seed=4)
    whole, cut = (make_harness(model, kv_bits=8, max_batched_tokens=tokens) for tokens in (256, 40))
    cut.submit("first", row, 6)
    for harness in whole, cut:
        answer(harness, "again", row, 6, sampling=SamplingParams(temperature=0.0, top_logprobs=0))
    got, want = ([out.logprobs[0].logprob for out in each.outputs("again")] for each in (cut, whole))
    assert got == pytest.approx(want, abs=0.02)
