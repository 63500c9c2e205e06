"""The scoring pool over processes that are made up: who gets one, how often a job is tried, and what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.rl.scoring import pool as pool_module
from mlx_parallm.rl.scoring.pool import Rule, ScoringError, ScoringPool, WorkerFault, WorkerHung

FAULTS = {"dies": WorkerFault("died"), "hangs": WorkerHung("took more than 1 s"), "raises": ScoringError("no")}


class FakeProcess:
    """Does as the message says, after some steps of the event loop. `log`: what all of them were asked, in order."""

    log: ClassVar[list[str]] = []

    def __init__(self, limit_s: float) -> None:
        self.busy = self.closed = False

    async def ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        assert not self.busy, "a process works on one job at a time"
        self.busy = True
        self.log.append(message["name"])
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


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(pool_module, "ScoringProcess", FakeProcess)
    FakeProcess.log = []
    return FakeProcess.log


def run(pool: ScoringPool, name: str, client: str = "", size: int = 1, steps: int = 1):
    return asyncio.create_task(pool.run(Rule(client, "exact", ""), size, {"name": name, "steps": steps}))


@pytest.mark.parametrize(("name", "tries"), [("dies", 2), ("hangs", 1), ("raises", 1), ("works", 1)])
async def test_only_a_process_that_dies_has_its_job_tried_again(name: str, tries: int, log: list[str]) -> None:
    pool = ScoringPool(1, 32, 1.0)
    ended, other = await asyncio.gather(run(pool, name), run(pool, "other"), return_exceptions=True)
    assert ended == {"name": name, "steps": 1} if name == "works" else str(ended) == str(FAULTS[name])
    assert isinstance(ended, dict | ScoringError)
    assert other == {"name": "other", "steps": 1}
    assert log.count(name) == tries


async def test_batches_of_a_client_stay_together(log: list[str]) -> None:
    pool = ScoringPool(1, 4, 1.0)
    jobs = [run(pool, f"{client}{number}", client, 2) for client in "ab" for number in range(3)]
    await asyncio.gather(*jobs)
    assert log[:4] == ["a0", "a1", "b0", "b1"]
    assert sorted(log[4:]) == ["a2", "b2"]  # by the time that both have used


async def test_close_fails_what_runs_and_what_waits_and_takes_no_more(log: list[str]) -> None:
    pool = ScoringPool(1, 32, 1.0)
    jobs = [run(pool, "a", steps=1000), run(pool, "b")]
    await asyncio.sleep(0)
    await pool.close()
    ends = await asyncio.gather(*jobs, run(pool, "c"), return_exceptions=True)
    assert [str(end) for end in ends] == [pool_module.CLOSED] * 3
    assert log == ["a"]


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
