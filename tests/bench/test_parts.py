"""The parts of `mlx_parallm bench --report`: the window of decode steps, the rounds, and how a section ends."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.bench import ours
from mlx_parallm.bench.comparison import Comparison, compare
from mlx_parallm.bench.ours import SETTLED, Ours, Window
from mlx_parallm.bench.report import ReportSection, Status
from mlx_parallm.bench.run import Sides
from mlx_parallm.bench.sizes import SIZES


@pytest.fixture
def clock(monkeypatch):
    """The time that `Window` reads: a list with one number."""
    now = [0.0]
    monkeypatch.setattr(ours.time, "perf_counter", lambda: now[0])
    return now


def test_a_window_counts_from_the_time_when_all_rows_decode(clock):
    window = Window(2, steps=10, seconds=100.0)
    for _ in range(SETTLED + 4):  # the first row begins early
        clock[0] += 1.0
        assert window.add(0, 1)
    for _ in range(SETTLED):
        clock[0] += 5.0  # the second row's prompt is slow
        assert window.add(1, 1)
    for _ in range(3):
        clock[0] += 0.5
        assert window.add(0, 1)
        assert window.add(1, 1)
    assert window.rate == pytest.approx(2 / 0.5)


@pytest.mark.parametrize(("steps", "seconds", "made"), [(4, 100.0, 4), (100, 2.0, 4)])
def test_a_window_ends_after_its_steps_or_its_seconds(clock, steps, seconds, made):
    window = Window(1, steps, seconds)
    window.add(0, SETTLED)
    for number in range(1, 1 + made):
        clock[0] += 0.5
        assert window.add(0, 1) is (number < made)
    assert window.rate == pytest.approx(2.0)


def test_rows_that_never_decode_together_have_no_rate(clock):
    window = Window(2, steps=10, seconds=100.0)
    window.add(0, SETTLED)
    with pytest.raises(RuntimeError, match="did not all decode at the same time"):
        _ = window.rate


# -- rounds --------------------------------------------------------------------------------------


def comparison(order: list[str], name: str = "x", rounds: int = 3, seconds: float = 0.0) -> Comparison:
    """Both sides give 10 and 20 times the round's number, plus 1."""

    def side(of: str, factor: float):
        async def measure(number: int) -> float:
            order.append(f"{name} {of} {number}")
            await asyncio.sleep(seconds)
            return factor * number + 1

        return measure

    return Comparison(name, "mlx-lm", rounds, side("ours", 10.0), side("theirs", 20.0))


async def test_the_sides_take_turns_and_the_first_round_does_not_count():
    order: list[str] = []
    figure = comparison(order)
    await compare([figure], until=time.monotonic() + 60)
    assert [step[2:] for step in order] == [
        *("ours 0", "theirs 0", "theirs 1", "ours 1", "ours 2", "theirs 2", "theirs 3", "ours 3")
    ]
    assert (figure.ours, figure.other) == ([11.0, 21.0, 31.0], [21.0, 41.0, 61.0])
    data = figure.as_json()
    assert (data["ours"], data["other"]) == (21.0, 41.0)
    assert data["ratio"] == {"median": 21 / 41, "low": 31 / 61, "high": 11 / 21}


async def test_a_budget_that_ends_costs_rounds_and_not_figures():
    order: list[str] = []
    figures = [comparison(order, name, rounds=1000, seconds=0.01) for name in "xy"]
    until = time.monotonic() + 0.5
    await compare(figures, until)
    assert all(1 <= len(figure.ours) < 1000 and figure.cut for figure in figures)
    fewer, more = sorted(len(figure.ours) for figure in figures)
    assert more <= 2 * fewer, "they take turns; the one whose slowest round was longer stops earlier"


async def test_a_first_round_that_compiles_kernels_does_not_say_how_long_a_round_takes():
    """On an H100 it took longer than all that was left, and no round after it was begun."""

    async def measure(number: int) -> float:
        await asyncio.sleep(0.01 if number else 0.6)
        return 1.0

    figure = Comparison("x", "mlx-lm", 3, measure, measure)
    await compare([figure], time.monotonic() + 2.0)
    assert not figure.cut


def test_what_was_not_measured_is_null():
    data = comparison([]).as_json()
    assert (data["ours"], data["other"], data["ratio"]) == (None, None, None)


# -- decode steps while the engine trains ----------------------------------------------------------


class Device:
    """Runs what is asked at once. Updates that begin end when they are abandoned, or fail at once with `error`."""

    def __init__(self, error: str = "") -> None:
        self.error, self.running = error, set[Future[Any]]()

    async def run(self, call: Callable[[], Any]) -> Any:
        found = call()
        return await asyncio.wrap_future(found) if isinstance(found, Future) else found

    def begin(self, policy: object, batch: object) -> Future[Any]:
        future = Future[Any]()
        if self.error:
            future.set_exception(RuntimeError(self.error))
        else:
            self.running.add(future)
        return future

    def abandon(self, policy: object) -> None:
        self.running.clear()


def sides(device: Device, decode: Callable[[], Awaitable[float]]) -> Sides:
    learner = SimpleNamespace(trainer=device)
    served: Any = SimpleNamespace(training=SimpleNamespace(parts=SimpleNamespace(learner=learner)))
    engine: Any = SimpleNamespace(processor=device)
    side: Any = Ours(engine, served)
    side._policy = object()
    side.decode = lambda *_: decode()
    unused: Any = None
    return Sides(engine, side, unused, unused, 50, SIZES["tiny"])


async def test_rows_that_are_measured_alone_have_no_update_beside_them():
    device, updates = Device(), list[int]()

    async def decode() -> float:
        await asyncio.sleep(0.01)
        updates.append(len(device.running))
        return 1.0

    await sides(device, decode).live(ReportSection("live", 1.0), time.monotonic() + 60)
    assert updates == [1, 0, 0, 1]


async def test_an_update_that_fails_is_not_taken_for_one_that_runs():
    async def decode() -> float:
        await asyncio.sleep(0.01)
        return 1.0

    with pytest.raises(RuntimeError, match="no gradients"):
        await sides(Device("no gradients"), decode).live(ReportSection("live", 1.0), time.monotonic() + 60)


# -- sections ------------------------------------------------------------------------------------


async def ended(work, limit_s: float = 60.0, **fields) -> ReportSection:
    section = ReportSection("decode", 1.0, limit_s=limit_s, **fields)
    await section.run(work)
    return section


async def test_an_error_costs_its_section_only_and_names_nobody():
    async def fails() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(raises())

    async def raises() -> None:
        raise RuntimeError(f"no memory for {Path.home()}/model")

    section = await ended(fails())
    assert (section.status, section.problem) == (Status.FAILED, "RuntimeError: no memory for ~/model")


async def test_a_section_is_cut_when_its_time_ends():
    section = await ended(asyncio.sleep(60), limit_s=0.01)
    assert (section.status, section.problem) == (Status.CUT, "")


async def test_its_own_timeout_is_an_error():
    async def times_out() -> None:
        raise TimeoutError("the device")

    assert (await ended(times_out())).status is Status.FAILED


async def test_missing_rounds_are_named():
    figure = comparison([])
    section = await ended(asyncio.sleep(0), figures=[figure])
    assert (section.status, section.as_json()["cut"]) == (Status.CUT, ["x: 0 of 3 rounds"])


async def test_a_check_that_does_not_pass_fails_the_section():
    checks = [{"name": "plain", "passed": True}, {"name": "mixed adapters", "passed": False}]
    section = await ended(asyncio.sleep(0), checks=checks)
    assert (section.status, section.problem) == (Status.FAILED, "checks that did not pass: mixed adapters")


async def test_a_cancellation_is_passed_on():
    section = ReportSection("decode", 1.0, limit_s=60.0)
    task = asyncio.create_task(section.run(asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert section.status is Status.INTERRUPTED
