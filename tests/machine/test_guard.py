"""The steps of the guard, and how they are undone."""

import pytest

from mlx_parallm.core.machine import Relief
from mlx_parallm.machine.guard import MemoryGuard
from mlx_parallm.machine.memory import MemoryReading, Pressure

LIMIT = 100 << 30


def steps(
    guard: MemoryGuard, reading: MemoryReading | None, seconds: int, at: int = 0, idle: bool = False
) -> list[int]:
    """The step after each of so many readings, one a second."""
    found = []
    for second in range(at, at + seconds):
        guard.update(reading, idle, float(second))
        found.append(int(guard.relief))
    return found


def of(share: float, pressure: Pressure = Pressure.NORMAL) -> MemoryReading:
    return MemoryReading(int(share * LIMIT), pressure)


def test_prefixes_go_first_then_rollouts_wait_then_requests_are_refused():
    assert steps(MemoryGuard(LIMIT), of(1.01), 9) == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_critical_pressure_of_the_system_counts_as_a_footprint_above_the_limit():
    guard = MemoryGuard(LIMIT)
    assert steps(guard, of(0.5, Pressure.CRITICAL), 7) == [1, 1, 1, 2, 2, 2, 3]
    assert guard.shortage == "the system's memory pressure is critical"


def test_a_mere_warning_costs_cached_prefixes_only():
    """A Mac with a browser open may be in this state for hours."""
    assert steps(MemoryGuard(LIMIT), of(0.5, Pressure.WARNING), 60)[-1] == Relief.PREFIXES


def test_all_is_undone_a_step_at_a_time_once_memory_has_been_enough_for_a_while():
    guard = MemoryGuard(LIMIT)
    steps(guard, of(1.5), 10)
    calm = steps(guard, of(0.5), 40, at=10)
    assert calm == [3] * 9 + [2] * 10 + [1] * 10 + [0] * 11
    assert guard.shortage == ""


def test_a_footprint_just_below_the_limit_undoes_nothing():
    guard = MemoryGuard(LIMIT)
    steps(guard, of(1.01), 10)
    assert set(steps(guard, of(0.97), 100, at=10)) == {3}
    assert guard.shortage == "this process takes more than --memory-guard allows"


def test_alternating_readings_do_not_make_the_steps_alternate():
    guard, found = MemoryGuard(LIMIT), []
    for second in range(0, 100, 2):
        found += steps(guard, of(1.01), 1, at=second) + steps(guard, of(0.5), 1, at=second + 1)
    assert found == sorted(found)


def test_while_memory_is_given_back_the_next_step_waits_but_not_forever():
    """Between two units of a slow device, some seconds can pass."""
    guard = MemoryGuard(LIMIT)
    found = []
    for second in range(40):
        guard.update(of(1.01), False, float(second), giving=True)
        found.append(int(guard.relief))
    assert found == [1] * 30 + [2] * 10


def test_a_footprint_above_the_limit_refuses_requests_and_stops_training_only_while_something_runs():
    """With nothing running, nothing more could be given back: weights that are larger than the limit stay there."""
    guard = MemoryGuard(LIMIT)
    steps(guard, of(1.01), 10)
    assert steps(guard, of(1.01), 60, at=10, idle=True)[-1] == Relief.PREFIXES


@pytest.mark.parametrize("idle", [False, True])
def test_a_memory_that_cannot_be_read_is_taken_as_enough(idle):
    guard = MemoryGuard(LIMIT)
    steps(guard, of(1.5), 10)
    assert steps(guard, None, 2, at=10, idle=idle) == [0, 0]
