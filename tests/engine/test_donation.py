"""No unit copies an array of the KV pool, although the unit before it may be in flight when it is built."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest
from few_operations import HEAD_DIM, HEADS, FewOperations, growth
from harness import Harness, make_harness
from lora import layout_of, random_adapter
from tiny import tiny_model
from word_grammar import Words

from mlx_parallm.adapters.weights import VersionInfo
from mlx_parallm.batch.attention import AttentionChoice
from mlx_parallm.batch.hidden import HiddenStates
from mlx_parallm.core.requests import Pooling, SamplingParams
from mlx_parallm.kv.arena import Arena
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.layer_state import LayerSpec

pytestmark = pytest.mark.ci

CACHED = [(7 * at) % 61 for at in range(1500)]
PROMPT = [(5 * at) % 59 for at in range(100)]
REQUESTS = {
    "greedy": {},
    "sampled": {"sampling": SamplingParams(temperature=1.0, top_p=0.9, seed=3)},
    "penalised, with logprobs": {
        "sampling": SamplingParams(temperature=0.0, repetition_penalty=1.3, top_logprobs=3),
        "prompt_logprobs": 2,
    },
    "with a grammar": {"grammar": Words(tuple(range(30)))},
    "embedded": {"pooling": Pooling.MEAN},
}


def made(**switches: object) -> Harness:
    """A pool with a long cached prefix. Each row attends alone, in fewer operations than by blocks."""
    harness = make_harness(FewOperations(), max_batched_tokens=64, **switches)
    harness.runner.attention = AttentionChoice(math.inf)
    harness.answer("cached", CACHED, 1)
    return harness


def stepped(harness: Harness) -> int:
    """Steps until idle. Returns how many bytes the steps needed at most besides the pool and what there was before.
    Steps that resize an arena are left out."""
    held = pool_bytes(harness)
    others, most, busy = mx.get_active_memory() - held, 0, True
    while busy:
        mx.reset_peak_memory()
        busy = harness.loop.step()
        harness.loop.check_integrity()
        before, held = held, pool_bytes(harness)
        if held == before:
            most = max(most, mx.get_peak_memory() - others - held)
    return most


def pool_bytes(harness: Harness) -> int:
    return sum(store.arena.array_bytes for store in harness.runner.cache.stores)


def array_bytes(harness: Harness) -> int:
    """Bytes of one array of the pool, which are all equal."""
    return int(harness.runner.cache.groups[0].arena.keys[0].nbytes)


@pytest.mark.parametrize("kind", REQUESTS)
def test_no_step_takes_the_memory_of_an_array_of_the_pool(kind: str) -> None:
    tokens = {}
    for lookahead in (True, False):
        harness = made(lookahead=lookahead)
        harness.submit("row", PROMPT, 12, **REQUESTS[kind])
        assert stepped(harness) < array_bytes(harness) / 2, lookahead
        tokens[lookahead] = harness.tokens("row")
    assert tokens[True] == tokens[False]


def test_hidden_states_that_are_kept_hold_no_array_of_the_pool() -> None:
    harness = made(lookahead=True)
    hidden = harness.runner.hidden = HiddenStates()
    harness.submit("row", PROMPT, 12)
    assert stepped(harness) < array_bytes(harness) / 2
    assert hidden.nbytes >= len(PROMPT) * HEADS * HEAD_DIM * 4


# ---- what is written between forward passes ------------------------------------------------------


def read_slowly(array: mx.array) -> mx.array:
    """Launches work that holds the array for some milliseconds."""
    noise = mx.random.normal((300, 300), key=mx.random.key(1))
    read = array.flatten()[0] + mx.linalg.eigvalsh(noise + noise.T, stream=mx.cpu)[0]
    mx.async_eval(read)
    return read


@pytest.fixture
def arena() -> Arena:
    made = Arena([LayerSpec(2, 256, 256)] * 3, mx.float32)
    made.resize(40)
    mx.eval(made.arrays())
    return made


def test_a_block_from_the_disk_is_written_in_place(arena: Arena) -> None:
    block = arena.read(3)
    in_flight = read_slowly(arena.keys[0])
    with growth() as grown:
        arena.write_block(5, block)
    mx.eval(in_flight)
    assert grown.nbytes < 0.5 * arena.keys[0].nbytes


def test_blocks_are_copied_in_place(arena: Arena) -> None:
    in_flight = read_slowly(arena.keys[0])
    with growth() as grown:
        arena.copy([1], [2])
    mx.eval(in_flight)
    assert grown.nbytes < 0.5 * arena.keys[0].nbytes


@pytest.mark.parametrize("blocks", [60, 20])
def test_an_arena_is_resized_layer_by_layer(arena: Arena, blocks: int) -> None:
    in_flight = read_slowly(arena.keys[0])
    with growth() as grown:
        arena.resize(blocks)
    mx.eval(in_flight)
    assert grown.nbytes < 3 * (60 - 40) / 40 * arena.array_bytes / 3 + 2.5 * arena.array_bytes / 3


def test_a_version_is_staged_in_place_although_rows_read_the_bank() -> None:
    model = tiny_model("llama", hidden_size=256)
    layout = layout_of(model)
    adapters = [random_adapter(layout, seed, rank=64) for seed in range(10)]
    harness = make_harness(model, slots=15, max_rank=64, lookahead=True)
    refs = [harness.publish(str(seed), each) for seed, each in enumerate(adapters[:9])]
    for ref in refs[:2]:
        harness.submit(ref.name, PROMPT[:20], 40, adapter=ref)
    harness.loop.step()
    harness.loop.step()
    assert harness.loop.in_flight
    largest = max(group.a.nbytes for group in harness.adapters.bank.groups.values())
    version = harness.adapters.registry.add("late", VersionInfo.of(adapters[9]))
    staged = harness.adapters.stage(version, adapters[9])
    while not staged.done():
        with growth() as grown:
            harness.loop.step()
        assert grown.nbytes < largest / 2
    assert len({group.slots for group in harness.adapters.bank.groups.values() if group.places}) == 1


@pytest.mark.parametrize("lookahead", [True, False])
def test_a_step_replaces_recurrent_states_layer_by_layer(lookahead: bool) -> None:
    """A step makes new states. Those before it are freed when their layer has read them."""
    model = tiny_model("mamba", num_hidden_layers=16, state_size=512)
    harness = make_harness(model, lookahead=lookahead)
    for number in range(4):
        harness.submit(str(number), PROMPT[number : number + 8], 8)
    harness.step(4)
    states = 4 * harness.runner.cache.layout.state_bytes
    for _ in range(3):
        with growth() as grown:
            harness.loop.step()
        assert grown.nbytes < states / 2


def test_no_pass_of_a_draft_model_takes_the_memory_of_an_array_of_its_pool() -> None:
    """One pass for each token of a draft."""
    harness = made(draft=FewOperations(), lookahead=False)
    own = harness.loop.draft_model._runner
    own.attention = AttentionChoice(math.inf)
    grown = []
    draw = harness.loop.draft_model._run

    def measured(drafts, counts):
        with growth() as taken:
            draw(drafts, counts)
        if max(counts) > 1:
            grown.append(taken.nbytes / min(array.nbytes for array in own.cache.arrays()))

    harness.loop.draft_model._run = measured
    harness.answer("row", PROMPT, 24)
    assert len(grown) > 3
    assert max(grown) < 0.5


@pytest.mark.parametrize("lookahead", [True, False])
def test_rows_of_a_model_that_runs_in_parts_take_no_memory_of_an_array_of_the_pool(lookahead: bool) -> None:
    """The parts read the arrays that get the new keys and values of all of them. Each copies those of its row."""
    harness = made(lookahead=lookahead)
    harness.runner._plan = prepare(harness.runner._model, compatible=True)
    for name in ("first", "second"):
        harness.submit(name, PROMPT, 12)
    assert stepped(harness) < array_bytes(harness) / 2
    assert harness.tokens("first") == harness.tokens("second")


def test_no_step_copies_the_tails_of_quantized_rows() -> None:
    """A step copies those of its own rows. Where a row's chunk fills a block, all are copied."""
    harness = made(lookahead=True, kv_bits=8)
    harness.loop._tidy = lambda **others: False  # the tails keep the places of rows that have ended
    for number in range(16):
        harness.submit(str(number), PROMPT[number : number + 3], 20)
    harness.run()
    harness.submit("row", PROMPT[:8], 12)
    assert stepped(harness) < harness.runner.cache.tails.arena.keys[0].nbytes / 2
