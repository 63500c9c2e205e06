"""Requests behind a long one get their tokens while it decodes, whatever the cost model predicts."""

from __future__ import annotations

import pytest
from harness import make_harness

from mlx_parallm.core.requests import RequestFinished, RequestStarted
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.scheduler import RLAwareScheduler
from mlx_parallm.engine.units import ForwardUnit


@pytest.fixture
def slow_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill is predicted to take minutes; on this machine it takes milliseconds."""
    monkeypatch.setattr(CostModel, "seconds", lambda self, chunks=(), samples=0: 1000.0)


@pytest.mark.usefixtures("slow_forecast")
def test_short_requests_are_served_behind_a_long_one() -> None:
    harness = make_harness()
    harness.submit("long", [1, 2, 3], max_tokens=60)
    while len(harness.tokens("long")) < 5:
        harness.loop.step()
    shorts = [f"short {number}" for number in range(3)]
    for name in shorts:
        harness.submit(name, list(range(1, 40)), max_tokens=2)
    while not all(any(isinstance(e, RequestFinished) for e in harness.of(name)) for name in shorts):
        harness.loop.step()
        harness.loop.check_integrity()
    assert len(harness.tokens("long")) < 60


def test_the_time_in_the_queue_ends_with_the_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make_harness()
    order: list[float] = []
    launched = RLAwareScheduler.record_launch

    def noted(self: RLAwareScheduler, unit: ForwardUnit, now: float) -> None:
        order.append(now)
        launched(self, unit, now)

    monkeypatch.setattr(RLAwareScheduler, "record_launch", noted)
    harness.submit("one", list(range(1, 200)), max_tokens=1)
    harness.run()
    end = harness.terminal("one")
    assert isinstance(end, RequestFinished)
    assert end.started_at == order[0]
    assert harness.of("one")[0] == RequestStarted(end.arrived_at, end.started_at)
    assert end.arrived_at <= end.started_at < end.first_token_at
