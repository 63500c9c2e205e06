"""Describes the machine that the figures were measured on."""

import mmap
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import mlx_parallm

PACKAGES = ("mlx-parallm", "mlx", "mlx-lm", "fastapi", "uvicorn")
CPUINFO = Path("/proc/cpuinfo")
FRESH_BYTES = 1 << 30
BUSY_LOAD = 1.0
"""Load average above which a warning is printed. Preparing a benchmark makes a little of it."""


def describe() -> dict[str, object]:
    """Hardware, versions and load average as JSON. The load average shows whether the machine was quiet."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "fresh_memory_gb_s": round(_fresh_memory_rate(), 2),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "blas": mlx_parallm.BLAS.name,
        "packages": {name: version(name) for name in PACKAGES},
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def resident_bytes(pid: int) -> int:
    """A process's resident memory now. It is read from /proc if there is one, because `ps` starts a process."""
    pages = Path(f"/proc/{pid}/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    kib = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout
    return int(kib) * 1024


def processor_seconds(pid: int) -> float:
    """Processor time that a process has taken until now. Read from /proc, so this is for Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def warn_if_busy() -> None:
    """Warns on stderr. Two processes that share the cores wait for each other's BLAS threads, and rates fall
    tenfold."""
    if (load := os.getloadavg()[0]) > BUSY_LOAD:
        print(f"the machine is busy (load average {load:.1f}): these figures will mean little", file=sys.stderr)


def _fresh_memory_rate() -> float:
    """How fast memory can be written that no process has used lately, in GB/s. On a virtual machine that gets its
    memory from the host page by page, this can be a tenth of the rate of memory in use, and then buffers that grow cost
    much more than elsewhere."""
    with mmap.mmap(-1, 2 * FRESH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON) as fresh:
        for page in range(0, 2 * FRESH_BYTES, mmap.PAGESIZE):
            if page == FRESH_BYTES:  # the first half may have been in use a moment ago
                started = time.perf_counter()
            fresh[page] = 1
        return FRESH_BYTES / (time.perf_counter() - started) / 1e9


def _processor() -> str:
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
