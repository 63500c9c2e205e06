"""Who is scored next, and that every job ends: on jobs and processes that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.rl.scoring import pool as pool_module
from mlx_parallm.rl.scoring.pool import FairQueue, Rule, ScoringError, ScoringJob, ScoringPool, WorkerFault, WorkerHung


def job(client: str, scorer: str = "exact", size: int = 1) -> ScoringJob:
    return ScoringJob(Rule(client, scorer, ""), size)


def put(queue: FairQueue, *jobs: ScoringJob) -> list[ScoringJob]:
    for each in jobs:
        queue.put(each)
    return list(jobs)


def served(queue: FairQueue, seconds: dict[str, float], count: int) -> str:
    """Clients in the order in which one process gets their jobs, each as long as its client's `seconds`."""
    order, ended = "", None
    for _ in range(count):
        ended = queue.take(ended)
        assert ended is not None
        queue.end(ended, seconds[ended.rule.client])
        order += ended.rule.client
    return order


def test_clients_share_the_time_and_not_the_turns() -> None:
    queue = FairQueue(1, 32)
    put(queue, *[job("s") for _ in range(10)], *[job("q") for _ in range(10)])
    assert served(queue, {"s": 5.0, "q": 1.0}, 12) == "sqqqqqsqqqqq"


def test_one_rule_holds_all_places_but_one() -> None:
    queue = FairQueue(3, 1)
    put(queue, *[job("a", "slow") for _ in range(5)])
    under_way = [queue.take(), queue.take()]
    assert queue.take() is None
    (late,) = put(queue, job("b"))
    assert queue.take() is late
    assert under_way[0] is not None
    queue.end(under_way[0], 1.0)
    queue.end(late, 1.0)
    assert queue.take() is not None


def test_a_newcomer_has_its_share_from_now_on_and_no_more() -> None:
    queue = FairQueue(1, 1)
    put(queue, *[job("a") for _ in range(9)])
    served(queue, {"a": 100.0}, 3)
    put(queue, *[job("b") for _ in range(9)])
    order = served(queue, {"a": 1.0, "b": 1.0}, 6)
    assert order.count("a") == order.count("b") == 3


def test_a_batch_has_jobs_of_one_rule_in_order_up_to_its_size() -> None:
    queue = FairQueue(1, 4)
    a, b, c, d, e = put(queue, job("x", size=2), job("x", "other"), job("x", size=2), job("x"), job("x", size=9))
    order: list[ScoringJob] = []
    for _ in range(5):
        taken = queue.take(order[-1] if order else None)
        assert taken is not None
        queue.end(taken, 0.01)
        order.append(taken)
    assert order == [a, c, b, d, e]
    assert queue.take(e) is None


def test_a_slow_rule_has_short_batches() -> None:
    queue = FairQueue(1, 32)
    put(queue, *[job("s") for _ in range(4)], *[job("q") for _ in range(4)])
    assert served(queue, {"s": 0.3, "q": 0.3}, 8) == "sqsqsqsq"
    put(queue, *[job("s") for _ in range(4)], *[job("q") for _ in range(4)])
    assert served(queue, {"s": 0.01, "q": 0.01}, 8) == "ssssqqqq"


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(1, 5), st.sampled_from("ptew")),
        max_size=60,
    ),
    st.integers(1, 3),
)
def test_every_job_is_taken_once_or_is_withdrawn_and_nothing_is_left(steps, places: int) -> None:
    queue = FairQueue(places, 4)
    waiting: list[ScoringJob] = []
    under_way: list[ScoringJob] = []
    ended: ScoringJob | None = None
    for client, rule, size, step in steps:
        if step == "p":
            waiting += put(queue, job(client, rule, size))
        elif step == "t" and len(under_way) < places and (taken := queue.take(ended)) is not None:
            waiting.remove(taken)
            under_way.append(taken)
            ended = None
        elif step == "e" and under_way:
            ended = under_way.pop(0)
            queue.end(ended, size / 20)
        elif step == "w" and waiting:
            queue.end(waiting.pop(), 0.0)
    for each in under_way:
        queue.end(each, 1.0)
    while (taken := queue.take()) is not None:
        waiting.remove(taken)
        queue.end(taken, 1.0)
    assert waiting == []
    assert queue.waiting == []
    (last,) = put(queue, job("d"))
    assert queue.take() is last
    queue.end(last, 1.0)
    assert queue._client_seconds == queue._rule_seconds == queue._running == {}


# ---- the pool ------------------------------------------------------------------------------------

FAULTS = {"dies": WorkerFault("died"), "hangs": WorkerHung("took more than 1 s"), "raises": ScoringError("no")}


class FakeProcess:
    """Does as the message says, after some steps of the event loop."""

    def __init__(self, limit_s: float) -> None:
        self.busy = self.closed = False

    async def ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        assert not self.busy, "a process works on one job at a time"
        self.busy = True
        try:
            for _ in range(message.get("steps", 1)):
                await asyncio.sleep(0)
                if self.closed:
                    raise WorkerFault("closed")
            if (fault := FAULTS.get(message["name"])) is not None:
                raise fault
            return message
        finally:
            self.busy = False

    async def close(self) -> None:
        self.closed = True


def run(pool: ScoringPool, name: str, client: str = "", size: int = 1, steps: int = 1):
    return asyncio.create_task(pool.run(Rule(client, "exact", ""), size, {"name": name, "steps": steps}))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["works", "dies", "hangs", "raises"]),
            st.sampled_from("abc"),
            st.integers(1, 5),
            st.integers(0, 4),
            st.none() | st.integers(0, 12),
        ),
        max_size=12,
    ),
    st.integers(1, 3),
)
def test_every_job_ends_and_every_process_is_free_again(jobs, processes: int) -> None:
    """`jobs`: what each does, its client, its size, how long it takes, and when its caller goes away."""

    async def all_of_them() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool_module, "ScoringProcess", FakeProcess)
            pool = ScoringPool(processes, 4, 1.0)
        tasks = [run(pool, name, client, size, steps) for name, client, size, steps, _ in jobs]
        for step in range(13):
            for task, job in zip(tasks, jobs, strict=True):
                if job[-1] == step:
                    task.cancel()
            await asyncio.sleep(0)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for (name, *_, leaves), end in zip(jobs, ends, strict=True):
            ok = isinstance(end, dict) if name == "works" else isinstance(end, ScoringError)
            assert ok or (leaves is not None and isinstance(end, asyncio.CancelledError))
        assert len(set(map(id, pool._idle))) == processes
        assert pool._queue.waiting == []
        assert pool._queue._client_seconds == pool._queue._rule_seconds == pool._queue._running == {}
        await pool.close()

    asyncio.run(all_of_them())
