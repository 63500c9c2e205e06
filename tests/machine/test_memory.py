"""What macOS and Linux say of memory, from readings that are made here."""

import ctypes
import sys
from pathlib import Path

import pytest

from mlx_parallm.machine.memory import MemoryReading, Pressure, linux_memory, mac_memory, read_memory

STATUS = "Name:\tpython\nVmRSS:\t9000 kB\nRssAnon:\t 5000 kB\nRssFile:\t4000 kB\nRssShmem:\t 24 kB\nVmSwap:\t 100 kB\n"
QUIET = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


def write(root: Path, **files: str) -> Path:
    named = {name.replace("__", "/").replace("_dot_", "."): text for name, text in files.items()}
    for name, text in ({"proc/self/status": STATUS, "proc/self/cgroup": "4:memory:/old\n0::/a/b\n"} | named).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def stalled(some: float, full: float) -> str:
    return (
        f"some avg10={some:.2f} avg60=0.00 avg300=0.00 total=1\nfull avg10={full:.2f} avg60=0.00 avg300=0.00 total=1\n"
    )


def test_the_footprint_has_no_files_that_can_be_read_again(tmp_path):
    root = write(tmp_path, proc__pressure__memory=QUIET)
    assert linux_memory(root) == MemoryReading((5000 + 24 + 100) * 1024, Pressure.NORMAL)


@pytest.mark.parametrize(
    ("some", "full", "level"),
    [(19.9, 19.9, Pressure.NORMAL), (20.0, 0.0, Pressure.WARNING), (80.0, 20.0, Pressure.CRITICAL)],
)
def test_tasks_that_wait_for_memory_are_pressure(tmp_path, some, full, level):
    assert linux_memory(write(tmp_path, proc__pressure__memory=stalled(some, full))).pressure is level


def test_a_container_counts_its_own_stalls_and_not_those_of_the_machine(tmp_path):
    pressure = {"sys__fs__cgroup__a__b__memory_dot_pressure": QUIET}
    assert linux_memory(write(tmp_path, proc__pressure__memory=stalled(90, 90), **pressure)).pressure is Pressure.NORMAL


@pytest.mark.parametrize(
    ("used", "maximum", "high", "level"),
    [
        (99, "max", "max", Pressure.NORMAL),
        (92, "100", "max", Pressure.NORMAL),
        (93, "100", "max", Pressure.WARNING),
        (97, "100", "max", Pressure.CRITICAL),
        (78, "100", "80", Pressure.CRITICAL),
    ],
)
def test_a_container_near_its_limit_is_short(tmp_path, used, maximum, high, level):
    limits = {"max": maximum, "high": high, "current": str(used + 50), "stat": "anon 1\ninactive_file 50\n"}
    files = {f"sys__fs__cgroup__a__b__memory_dot_{name}": text for name, text in limits.items()}
    assert linux_memory(write(tmp_path, proc__pressure__memory=QUIET, **files)).pressure is level


@pytest.mark.parametrize(
    ("available", "level"), [(50, Pressure.NORMAL), (49, Pressure.WARNING), (19, Pressure.CRITICAL)]
)
def test_without_stalls_what_is_available_counts(tmp_path, available, level):
    meminfo = f"MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n"
    assert linux_memory(write(tmp_path, proc__meminfo=meminfo)).pressure is level


@pytest.mark.parametrize("text", ["", "some avg10=odd\n", "full avg10=1.0"])
def test_odd_or_missing_files_are_an_error_that_the_watch_can_handle(tmp_path, text):
    with pytest.raises((OSError, ValueError, KeyError)):
        linux_memory(write(tmp_path, proc__pressure__memory=text))


class LibSystem:
    """Fills what it is given as macOS does: `struct rusage_info_v0` has phys_footprint after a uuid and 7 numbers."""

    def __init__(self, footprint: int, level: int, error: int = 0) -> None:
        self.footprint, self.level, self.error = footprint, level, error

    def proc_pid_rusage(self, pid, flavor, usage):
        assert flavor == 0
        assert ctypes.sizeof(usage._obj) == 96
        ctypes.c_uint64.from_buffer(usage._obj, 72).value = self.footprint
        return self.error

    def sysctlbyname(self, name, value, size, new, new_size):
        assert (name, size._obj.value) == (b"kern.memorystatus_vm_pressure_level", 4)
        value._obj.value = self.level
        return self.error


@pytest.mark.parametrize(("level", "pressure"), [(1, Pressure.NORMAL), (2, Pressure.WARNING), (4, Pressure.CRITICAL)])
def test_macos_says_its_footprint_and_its_pressure(level, pressure):
    assert mac_memory(LibSystem(7 << 30, level)) == MemoryReading(7 << 30, pressure)


@pytest.mark.parametrize("library", [LibSystem(1, 1, error=-1), LibSystem(1, 3)])
def test_macos_may_refuse_or_say_something_odd(library):
    with pytest.raises((OSError, KeyError)):
        mac_memory(library)


def test_this_machine_has_a_reading():
    held = bytearray(b"x" * (64 << 20))
    before = read_memory().footprint
    assert before > len(held)
    del held
    assert sys.platform == "darwin" or read_memory().footprint < before
