"""What a request is told of the prefix cache, and how the memory of ended rows goes back to the device."""

from __future__ import annotations

import pytest
from harness import GREEDY, Harness, make_harness
from lora import layout_of, random_adapter
from tiny import tiny_model

from mlx_parallm.adapters.registry import KEPT_VERSIONS
from mlx_parallm.core.requests import GenerationRequest, RequestFinished, StopParams

pytestmark = pytest.mark.ci

LONG = [7, 3, 9, 1] * 50
OTHER = [2, 8] * 50


def looked_up(harness: Harness) -> tuple[int, int]:
    stats = harness.loop.stats()
    return stats.prefix_cache_hits_total, stats.prefix_cache_queries_total


# ---- cached tokens ---------------------------------------------------------------------------------


def test_every_prompt_of_a_request_counts_once_whatever_n_is() -> None:
    harness = make_harness()
    harness.answer("first", LONG, n=3)
    assert (harness.cached("first"), looked_up(harness)) == (0, (0, 200)), "a group shares, but it is no hit"
    prompts = (tuple(LONG), tuple(OTHER), tuple(LONG + OTHER))
    harness.loop.submit(GenerationRequest("three", prompts, GREEDY, StopParams(4), n=2))
    harness.run()
    assert harness.cached("three") == 192 + 0 + 200
    assert looked_up(harness) == (392, 200 + 200 + 100 + 300)


def test_a_reset_tells_how_many_tokens_it_forgot() -> None:
    harness = make_harness()
    harness.answer("first", LONG, 8)
    assert harness.loop.reset_prefix_cache().result() == 207, "the last token of the answer was never computed"
    assert harness.loop.reset_prefix_cache().result() == 0
    harness.answer("again", LONG, 8)
    assert harness.cached("again") == 0


def be_quiet(patched: pytest.MonkeyPatch) -> None:
    """Makes any time without a new row count as a long one."""
    patched.setattr("mlx_parallm.engine.memory._QUIET_S", -1.0)
    patched.setattr("mlx_parallm.engine.memory._QUIET_WITH_CACHE_S", -1.0)
    patched.setattr("mlx_parallm.engine.memory._TIDY_EVERY_S", -1.0)
    patched.setattr("mlx_parallm.engine.memory._TIDY_SHARE", float("inf"))
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
    harness.until(lambda: held(harness) <= 1.15 * cache.bytes_used)
    assert len(harness.tokens("straggler")) < 200
    assert sum(array.nbytes for array in cache.arrays()) < burst
    harness.run()
    assert held(harness) <= cache.bytes_cached, "without a prefix cache, an idle server holds nothing"
    assert (cache.bytes_cached > 0) is keep_prefixes


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
