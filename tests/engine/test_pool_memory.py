"""What a request is told of the prefix cache, and how the memory of ended rows goes back to the device."""

from __future__ import annotations

import pytest
from harness import GREEDY, Harness, make_harness
from lora import layout_of, random_adapter
from tiny import tiny_model

from mlx_parallm.adapters.registry import KEPT_VERSIONS
from mlx_parallm.core.requests import GenerationRequest, RequestFinished, StopParams
from mlx_parallm.kv.arena import Arena

pytestmark = pytest.mark.ci

LONG = [7, 3, 9, 1] * 50
OTHER = [2, 8] * 50


def cached_tokens(harness: Harness, request_id: str) -> int:
    finished = harness.terminal(request_id)
    assert isinstance(finished, RequestFinished)
    return finished.cached_tokens


def looked_up(harness: Harness) -> tuple[int, int]:
    stats = harness.loop.stats()
    return stats.prefix_cache_hits_total, stats.prefix_cache_queries_total


# ---- cached tokens ---------------------------------------------------------------------------------


def test_each_prompt_counts_once_whatever_n_is() -> None:
    harness = make_harness()
    harness.answer("first", LONG, 4, n=3)
    assert (cached_tokens(harness, "first"), looked_up(harness)) == (0, (0, 200)), "a group shares, but it is no hit"
    harness.answer("again", LONG, 4, n=3)
    assert (cached_tokens(harness, "again"), looked_up(harness)) == (192, (192, 400))


def test_every_prompt_of_a_request_counts() -> None:
    harness = make_harness()
    harness.answer("first", LONG)
    prompts = (tuple(LONG), tuple(OTHER), tuple(LONG + OTHER))
    harness.loop.submit(GenerationRequest("three", prompts, GREEDY, StopParams(4), n=2))
    harness.run()
    assert cached_tokens(harness, "three") == 192 + 0 + 200
    assert looked_up(harness) == (392, 200 + 200 + 100 + 300)


def test_a_scored_prompt_is_computed_whole_and_does_not_count() -> None:
    harness = make_harness()
    harness.answer("first", LONG)
    before = looked_up(harness)
    harness.answer("scored", LONG, 4, n=2, prompt_logprobs=1)
    assert (cached_tokens(harness, "scored"), looked_up(harness)) == (0, before)


def test_a_row_that_is_computed_again_does_not_count_again() -> None:
    harness = make_harness(budget_tokens=448)
    for number in range(3):
        harness.submit(str(number), [20 + number] * 100, 80)
    harness.run()
    assert harness.loop.stats().preemptions_total > 0
    assert [cached_tokens(harness, str(number)) for number in range(3)] == [0, 0, 0]
    assert looked_up(harness) == (0, 300)


def test_a_reset_tells_how_many_tokens_it_forgot() -> None:
    harness = make_harness()
    harness.answer("first", LONG, 8)
    assert harness.loop.reset_prefix_cache().result() == 207, "the last token of the answer was never computed"
    assert harness.loop.reset_prefix_cache().result() == 0
    harness.answer("again", LONG, 8)
    assert cached_tokens(harness, "again") == 0


def be_quiet(patched: pytest.MonkeyPatch) -> None:
    """Makes any time without a new row count as a long one."""
    patched.setattr("mlx_parallm.engine.memory._QUIET_S", -1.0)
    patched.setattr("mlx_parallm.engine.memory._QUIET_WITH_CACHE_S", -1.0)
    patched.setattr("mlx_parallm.engine.memory._TIDY_EVERY_S", -1.0)
    have_no_pause(patched)


def have_no_pause(patched: pytest.MonkeyPatch) -> None:
    """The engine tidies up as soon as it has nothing else to do."""
    patched.setattr("mlx_parallm.engine.memory._PAUSE_S", -1.0)


# ---- memory ----------------------------------------------------------------------------------------


def held(harness: Harness) -> int:
    """Bytes of the pool's arrays, except cached prefixes."""
    cache = harness.runner.cache
    assert sum(array.nbytes for array in cache.arrays()) == cache.bytes_held + cache.bytes_cached
    return cache.bytes_held


@pytest.mark.parametrize("keep_prefixes", [True, False])
def test_a_straggler_and_an_idle_loop_hold_what_they_use(keep_prefixes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make_harness(max_batched_tokens=2048)
    cache = harness.runner.cache
    cache.keep_prefixes = keep_prefixes
    harness.submit("straggler", [5] * 1000, 200)
    for number in range(14):
        harness.submit(str(number), [20 + number] * 300, 10)
    burst = 0
    while harness.loop.stats().running + harness.loop.stats().waiting > 1:
        harness.loop.step()
        burst = max(burst, sum(array.nbytes for array in cache.arrays()))
    be_quiet(monkeypatch)
    harness.step(5)
    assert len(harness.tokens("straggler")) < 200
    assert held(harness) <= 1.15 * cache.bytes_used
    assert sum(array.nbytes for array in cache.arrays()) < burst
    harness.run()
    assert held(harness) <= cache.bytes_cached, "without a prefix cache, an idle server holds nothing"
    assert (cache.bytes_cached > 0) is keep_prefixes


def test_blocks_are_kept_for_the_next_rows_while_rows_keep_coming() -> None:
    harness = make_harness(max_batched_tokens=2048)
    harness.answer("first", LONG)
    blocks = harness.runner.cache.groups[0].allocator.total
    harness.step(20)
    assert harness.runner.cache.groups[0].allocator.total == blocks


def test_a_request_after_an_idle_time_finds_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena copies itself when it grows; nobody waits for that while the server has nothing else to do."""
    have_no_pause(monkeypatch)
    harness = make_harness(max_batched_tokens=2048)
    resized = []
    resize = Arena.resize

    def counted(arena: Arena, blocks: int, *most: int) -> bool:
        before, done = arena.array_bytes, resize(arena, blocks, *most)
        if arena.array_bytes != before:
            resized.append(harness.loop.stats().running + harness.loop.stats().waiting)
        return done

    for number in range(40):
        harness.answer(str(number), [20 + number] * 300, 10)
        if number == 0:
            monkeypatch.setattr(Arena, "resize", counted)
    assert len(resized) > 3
    assert not any(resized)


def grown_without_need(harness: Harness, patched: pytest.MonkeyPatch) -> int:
    """How often the arena grows while no row runs, although it is not short of places."""
    group, grown, resize = harness.runner.cache.groups[0], 0, Arena.resize

    def counted(arena: Arena, blocks: int, *most: float) -> bool:
        nonlocal grown
        grown += blocks > arena.blocks and not group.allocator.used and not group.is_short()
        return resize(arena, blocks, *most)

    with patched.context() as counting:
        counting.setattr(Arena, "resize", counted)
        for number in range(20):
            harness.answer(str(number), [20 + number] * 300, 10)
    return grown


def test_a_client_that_asks_again_at_once_does_not_wait_for_an_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas are resized in the pauses between requests, but not in the first moment of one, unless they are short."""
    monkeypatch.setattr("mlx_parallm.engine.memory._PAUSE_S", 1000.0)
    harness = make_harness(max_batched_tokens=2048)
    group = harness.runner.cache.groups[0]
    assert grown_without_need(harness, monkeypatch) == 0
    blocks = group.allocator.total
    harness.runner.cache.evict(harness.runner.cache.groups[0], blocks)
    harness.run()
    assert group.allocator.total == blocks
    have_no_pause(monkeypatch)
    harness.run()
    assert group.allocator.total < blocks
    assert grown_without_need(make_harness(max_batched_tokens=2048), monkeypatch) > 0


def test_memory_is_given_back_a_bounded_number_of_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call leaves the loop free for requests that have come."""
    monkeypatch.setattr("mlx_parallm.engine.memory._TIDY_BYTES_ON_CPU", 1)
    have_no_pause(monkeypatch)
    harness = make_harness(max_batched_tokens=2048)
    for number in range(12):
        harness.submit(str(number), [20 + number] * 300, 10)
    harness.run()
    harness.runner.cache.evict(harness.runner.cache.groups[0], 40)
    arrays = harness.runner.cache.groups[0].arena.keys
    before = sizes = [keys.nbytes for keys in arrays]
    while harness.loop.step():
        now = [keys.nbytes for keys in arrays]
        assert sum(size != was for size, was in zip(now, sizes, strict=True)) <= 1
        sizes = now
    assert sizes < before
    harness.answer("late", LONG)
    assert isinstance(harness.terminal("late"), RequestFinished)
    assert held(harness) <= 24 * harness.runner.cache.groups[0].arena.block_bytes


def test_freed_buffers_are_given_back_when_a_row_has_ended_and_not_after_every_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLX takes the buffers of the next unit from those of the last one."""
    be_quiet(monkeypatch)
    harness = make_harness()
    harness.answer("first", LONG)
    assert harness.loop.stats().kv_bytes_cached > 0
    given_back: list[int] = []
    monkeypatch.setattr("mlx_parallm.engine.memory.mx.clear_cache", lambda: given_back.append(1))
    harness.submit("second", OTHER, 20)
    harness.until(lambda: len(harness.tokens("second")) >= 10)
    assert not given_back
    harness.run()
    harness.run()
    assert len(given_back) == 1


def test_the_prefixes_of_a_forgotten_version_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the newest few versions stay, because a rollback makes one of them live again."""
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model)
    for seed in range(KEPT_VERSIONS + 3):
        ref = harness.publish("a", random_adapter(layout, seed))
        harness.answer(str(seed), LONG, adapter=ref)
    kept = set(harness.adapters.registry.versions())
    assert {root.version for root in harness.runner.cache.index.roots()} == kept
    assert len(kept) < KEPT_VERSIONS + 3
    be_quiet(monkeypatch)
    harness.run()
    assert held(harness) <= 24 * harness.runner.cache.groups[0].arena.block_bytes, "and their memory has gone back"
