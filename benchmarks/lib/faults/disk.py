"""Disk: a folder on which writes fail or take their time, and which can be looked at amid each write. Linux only.

A library (`shim.c`) is preloaded into the process that is tried, and stands before the C library's calls that write:
`open` of a file to be written, `write`, `fsync`, `ftruncate`, `rename`, `mkdir`, `unlink`, `rmdir`, `chmod` and
`utime`. Python, SQLite and the writers of safetensors go through it alike. Calls below the folder are counted, so that
"the n-th write" can be meant. What to do stands in shared memory, and may change while the process runs. The library
can shift the wall clock of the process, too.

`watched` holds the process at each write. A copy of the folder that is made then is what SIGKILL would leave.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
WORKS_HERE = sys.platform == "linux" and COMPILER is not None
_HOLD = -1
FOREVER = 1 << 62
_FIELDS = ("fault", "first", "last", "write_us", "fsync_us", "count", "hits", "clock_us", "held", "released")
_TEXT = 8 * len(_FIELDS)
_SIZE = _TEXT + 256


class Disk:
    """The folder at `path`, for processes that are started with `environment`.

    Args:
        site: an existing folder outside of `path`, for the library and the shared memory.
    """

    def __init__(self, path: Path, site: Path) -> None:
        assert COMPILER is not None
        path.mkdir(parents=True, exist_ok=True)
        library, control = site / "shim.so", site / "control"
        source = Path(__file__).with_name("shim.c")
        subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
        control.write_bytes(bytes(_SIZE))
        with control.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAULTS_CONTROL": str(control),
            "FAULTS_FOLDER": os.path.realpath(path),
        }

    @property
    def writes(self) -> int:
        """Calls so far that would write."""
        return self._get("count")

    @property
    def hits(self) -> int:
        """Calls that were hit since the last `fail` or `heal`."""
        return self._get("hits")

    @property
    def what(self) -> str:
        """The first call that was hit, and its path in the folder."""
        return self._memory[_TEXT:].split(b"\0")[0].decode(errors="replace")

    def fail(self, fault: int, after: int = 0, calls: int = FOREVER) -> None:
        """From the call `after` from now, so many calls end with `fault`, an errno. On a full disk (ENOSPC), the first
        one may write a part of its bytes, and what makes room succeeds."""
        self.heal()
        first = self.writes + after
        self._set(first=first, last=min(FOREVER, first + calls - 1))
        self._set(fault=fault)

    def slow(self, fsync_s: float, write_s: float = 0.0) -> None:
        """From now on, each fsync, and each other call, takes so long."""
        self._set(fsync_us=int(fsync_s * 1e6), write_us=int(write_s * 1e6))

    def heal(self) -> None:
        """Nothing fails from now on, and nothing is slow."""
        self._set(fault=0, fsync_us=0, write_us=0)
        self._set(hits=0)
        self._memory[_TEXT:] = bytes(_SIZE - _TEXT)

    def shift_clock(self, seconds: float) -> None:
        """The wall clock of the process is the machine's plus so many seconds."""
        self._set(clock_us=int(seconds * 1e6))

    @contextmanager
    def watched(self, look: Callable[[], None]) -> Iterator[None]:
        """While the block runs, holds the process before each call, and amid each `write`, until `look` has returned.
        It is called on a thread of its own."""
        self.heal()
        ended, held = threading.Event(), self._get("held")

        def watch(released: int) -> None:
            try:
                while not ended.is_set():
                    if self._get("held") > released:
                        look()
                        released += 1
                        self._set(released=released)
                    else:
                        time.sleep(0.0002)
            finally:
                self._set(fault=0)  # nothing is held any more

        self._set(released=held, first=0, last=FOREVER)
        self._set(fault=_HOLD)
        with ThreadPoolExecutor(1) as thread:
            watching = thread.submit(watch, held)
            try:
                yield
            finally:
                ended.set()
                watching.result()

    def _get(self, name: str) -> int:
        value: int = struct.unpack_from("q", self._memory, 8 * _FIELDS.index(name))[0]
        return value

    def _set(self, **values: int) -> None:
        for name, value in values.items():
            struct.pack_into("q", self._memory, 8 * _FIELDS.index(name), value)
