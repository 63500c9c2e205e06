"""The cores that other programs use, and the threads that matrix products get."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from mlx_parallm.blas import Blas
from mlx_parallm.machine import processors
from mlx_parallm.machine.processors import BlasThreads, OtherPrograms

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/stat")


def threads(cores, busy, monkeypatch):
    """BLAS threads on so many cores, and the list of what they were set to. `busy`: what others use, in turn."""
    monkeypatch.setattr(processors, "usable_cores", lambda: cores)
    told, readings = [], iter(busy)
    return BlasThreads(Blas("openblas", True, "", told.append), lambda: next(readings)), told


@pytest.mark.parametrize(
    ("cores", "busy", "count"),
    [(2, 0.1, 2), (2, 0.9, 1), (2, 1.8, 1), (8, 0.3, 8), (8, 3.2, 5), (8, 8.0, 1), (8, 9.0, 1)],
)
def test_products_use_the_cores_that_other_programs_leave_and_at_least_one(cores, busy, count, monkeypatch):
    chosen, _ = threads(cores, [busy], monkeypatch)
    chosen.adapt()
    assert chosen.count == count


def test_the_number_follows_and_is_logged_when_it_changes(monkeypatch, caplog):
    caplog.set_level("INFO")
    chosen, told = threads(2, [0.0, 1.7, 1.9, 0.1], monkeypatch)
    for _ in range(4):
        chosen.adapt()
    assert told == [1, 2]
    assert [record.message for record in caplog.records] == [
        "matrix products use 1 of 2 threads: other programs use 1.7 of 2 cores",
        "matrix products use 2 of 2 threads: other programs use 0.1 of 2 cores",
    ]


def test_a_number_from_the_environment_stays():
    program = (
        "import mlx_parallm\n"
        "from mlx_parallm.machine.processors import BlasThreads\n"
        "threads = BlasThreads(); threads.adapt(); threads.use(1)\n"
        "print(threads.most, threads.count)"
    )
    environment = {**processors.os.environ, "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["0", "0"]


@LINUX
def test_a_reading_waits_for_a_quarter_of_a_second_after_the_one_before_and_no_longer(monkeypatch):
    now, waited = [100.0], []

    def sleep(seconds):
        waited.append(seconds)
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, process_time=time.process_time)
    monkeypatch.setattr(processors, "time", clock)
    others = OtherPrograms()
    for passed in (0.05, 1.0):
        now[0] += passed
        others.cores()
    assert waited == [pytest.approx(0.2), 0.0]


@LINUX
def test_another_process_that_burns_a_core_is_seen_and_this_one_is_not():
    others = OtherPrograms()
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(2)
        _burn_until(time.monotonic() + 1)
        assert others.cores() > 0.2
    finally:
        burner.kill()
        burner.wait()


def _burn_until(end):
    while time.monotonic() < end:
        pass


@LINUX
def test_what_this_process_uses_does_not_count(monkeypatch):
    monkeypatch.setattr(processors.Path, "read_text", lambda self: stat.pop(0))
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr(processors.time, "process_time", lambda: used.pop(0))
    monkeypatch.setattr(processors.time, "monotonic", lambda: clock.pop(0))
    # 1.5 s of core 0 and 2 s of core 1 within 2 s, of which 1 s is ours; core 2 is not for us.
    first = "cpu 0 0 0 0\ncpu0 100 0 100 5 0 0 0 0 0 0\ncpu1 0 0 0 9 0 0 0 0 0 0\ncpu2 0 0 0 0 0 0 0 0 0 0\nintr 5"
    second = "cpu 0 0 0 0\ncpu0 200 20 110 9 9 10 5 5 0 0\ncpu1 200 0 0 9 0 0 0 0 0 0\ncpu2 900 0 0 0 0 0 0 0 0 0\n"
    stat, used, clock = [first, second], [3.0, 4.0], [10.0, 12.0, 12.0, 12.0]
    assert OtherPrograms().cores() == pytest.approx((1.5 + 2 - 1) / 2)
