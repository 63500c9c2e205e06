"""What the engine holds back and gives back while the machine is short of memory."""

from __future__ import annotations

import mlx.core as mx
import pytest
from harness import GREEDY, Harness, make_harness

from mlx_parallm.core.machine import Relief
from mlx_parallm.core.requests import GenerationRequest, StopParams, WorkClass

pytestmark = pytest.mark.ci

PROMPTS = [[20 + number] * 300 for number in range(12)]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.engine.memory._PAUSE_S", 0.0)


def with_cached_prefixes(**options: object) -> Harness:
    harness = make_harness(max_batched_tokens=2048, **options)
    for number, prompt in enumerate(PROMPTS):
        harness.answer(str(number), prompt, 10)
    assert harness.loop.stats().kv_bytes_cached > 0
    return harness


def array_bytes(harness: Harness) -> int:
    return sum(array.nbytes for array in harness.runner.cache.arrays())


def test_cached_prefixes_leave_the_process_and_not_only_the_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.kv.memory._EVICTED_BLOCKS", 7)
    harness = with_cached_prefixes()
    before, active = array_bytes(harness), mx.get_active_memory()
    harness.loop.relieve(Relief.PREFIXES)
    harness.run()
    harness.loop.check_integrity()
    assert (harness.loop.stats().kv_bytes_cached, array_bytes(harness)) == (0, 0)
    assert active - mx.get_active_memory() >= before
    assert mx.get_cache_memory() == 0
    assert not harness.loop.step(), "the loop is idle again"


def test_running_rows_go_on_and_leave_nothing_behind() -> None:
    alone = make_harness(max_batched_tokens=2048)
    alone.answer("long", PROMPTS[0], 150)
    harness = with_cached_prefixes()
    harness.submit("long", PROMPTS[0], 150)
    harness.step(20)
    harness.loop.relieve(Relief.PREFIXES)
    harness.step(60)
    held, used = array_bytes(harness), harness.runner.cache.bytes_used
    assert used <= held <= 1.5 * used
    harness.run()
    harness.loop.check_integrity()
    assert harness.tokens("long") == alone.tokens("long")
    assert (harness.loop.stats().kv_bytes_cached, array_bytes(harness)) == (0, 0)


def test_rollouts_wait_and_live_requests_do_not() -> None:
    harness = make_harness()
    harness.loop.relieve(Relief.ROLLOUTS)
    for name, kind in (("rollout", WorkClass.TRAINING), ("live", WorkClass.INFERENCE)):
        prompts = (tuple(PROMPTS[0]),)
        harness.loop.submit(GenerationRequest(name, prompts, GREEDY, StopParams(4), work_class=kind))
    harness.run()
    assert len(harness.tokens("live")) == 4
    assert not harness.of("rollout")
    harness.loop.relieve(Relief.PREFIXES)
    harness.run()
    assert len(harness.tokens("rollout")) == 4
