"""The memory of this process and of the machine, as reported by macOS and Linux.

Both functions raise OSError, ValueError or KeyError if the system does not say what is expected of it.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any


class Pressure(IntEnum):
    """How short of memory the machine, or the container, is."""

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """`footprint`: bytes that end with this process, swapped or compressed ones among them."""

    footprint: int
    pressure: Pressure


def read_memory() -> MemoryReading:
    """The reading of this machine."""
    return mac_memory(ctypes.CDLL(None)) if sys.platform == "darwin" else linux_memory(Path("/"))


# -- macOS -----------------------------------------------------------------------------------------


class _Usage(ctypes.Structure):
    """`struct rusage_info_v0` of <sys/resource.h>."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("before", ctypes.c_uint64 * 7),
        ("phys_footprint", ctypes.c_uint64),
        ("after", ctypes.c_uint64 * 2),
    )


_PRESSURE_LEVEL = b"kern.memorystatus_vm_pressure_level"
_MAC_LEVELS = {1: Pressure.NORMAL, 2: Pressure.WARNING, 4: Pressure.CRITICAL}


def mac_memory(system: Any) -> MemoryReading:
    """`system`: libSystem. The footprint is what Activity Monitor shows as memory; the pressure is its colour."""
    usage = _Usage()
    if system.proc_pid_rusage(os.getpid(), 0, ctypes.byref(usage)) != 0:
        raise OSError("proc_pid_rusage failed")
    level, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    if system.sysctlbyname(_PRESSURE_LEVEL, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        raise OSError("sysctl kern.memorystatus_vm_pressure_level failed")
    return MemoryReading(int(usage.phys_footprint), _MAC_LEVELS[level.value])


# -- Linux -----------------------------------------------------------------------------------------

_OWN_MEMORY = ("RssAnon", "RssShmem", "VmSwap")
_CGROUP_SHARES = {Pressure.CRITICAL: 0.97, Pressure.WARNING: 0.93}
"""Shares of a container's limit in use. Files that can be read again do not count."""
_STALLED_PERCENT = 20.0
"""Share of the last ten seconds in which some task (warning) or every task (critical) waited for memory."""
_AVAILABLE_SHARES = {Pressure.CRITICAL: 0.02, Pressure.WARNING: 0.05}
"""Shares of RAM that are available, where the kernel does not measure stalls."""


def linux_memory(root: Path) -> MemoryReading:
    """`root`: where proc and sys are."""
    status = _numbers(root / "proc/self/status")
    footprint = 1024 * sum(status.get(name, 0) for name in _OWN_MEMORY)
    cgroup = _cgroup(root)
    return MemoryReading(footprint, max(_pressure_of_limit(cgroup), _pressure_of_stalls(root, cgroup)))


def _cgroup(root: Path) -> Path:
    """The folder of this process' cgroup; the root's in a container, which sees no other."""
    lines = (root / "proc/self/cgroup").read_text().splitlines()
    path = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    return root / "sys/fs/cgroup" / path


def _pressure_of_limit(cgroup: Path) -> Pressure:
    limits = [text for name in ("memory.max", "memory.high") if (text := _text(cgroup / name)) not in ("", "max")]
    if not limits:
        return Pressure.NORMAL
    used = int(_text(cgroup / "memory.current")) - _numbers(cgroup / "memory.stat")["inactive_file"]
    share = used / min(map(int, limits))
    return next((level for level, least in _CGROUP_SHARES.items() if share >= least), Pressure.NORMAL)


def _pressure_of_stalls(root: Path, cgroup: Path) -> Pressure:
    text = _text(cgroup / "memory.pressure") or _text(root / "proc/pressure/memory")
    if not text:
        return _pressure_of_available(_numbers(root / "proc/meminfo"))
    stalled = {kind: float(percent) for kind, percent in re.findall(r"(some|full) avg10=([\d.]+)", text)}
    if stalled.get("full", 0.0) >= _STALLED_PERCENT:
        return Pressure.CRITICAL
    return Pressure.WARNING if stalled["some"] >= _STALLED_PERCENT else Pressure.NORMAL


def _pressure_of_available(memory: dict[str, int]) -> Pressure:
    share = memory["MemAvailable"] / memory["MemTotal"]
    return next((level for level, most in _AVAILABLE_SHARES.items() if share < most), Pressure.NORMAL)


def _text(file: Path) -> str:
    """The content; empty if there is no such file, or if the kernel does not fill it."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _numbers(file: Path) -> dict[str, int]:
    """The first number of each line by the name before it."""
    return {name: int(number) for name, number in re.findall(r"^(\w+):?\s+(\d+)", file.read_text(), re.MULTILINE)}
