"""A plugin of pytest that says what each test does: whether it fails and, if asked, which functions it calls."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest


def name_of(file: str, function: str) -> str:
    return f"{file}:{function}"


class Progress:
    """Writes the name of each test that ends to a file, with what became of it: `passed` or `failed`."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        os.write(self._file, f"{'failed' if nodeid in self._failed else 'passed'} {nodeid}\n".encode())

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self) -> bool:
        """Sets none: time of the clock says nothing on a busy machine. See `running.py` for the limits."""
        return True


class Reach:
    """Notes which functions of the package each test calls, in all threads of its process.

    It writes the CPU seconds and the functions of each test that passes to a file, as JSON. What the import of a test
    module or a shared fixture calls counts for all tests of the file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._package = str(Path.cwd() / "mlx_parallm") + os.sep
        self._called: dict[int, CodeType] = {}
        self._shared: set[str] = set()
        self._tests: dict[str, tuple[float, set[str]]] = {}
        self._not_passed: set[str] = set()
        self._start()

    def _start(self) -> None:
        threading.settrace(self._trace)
        sys.settrace(self._trace)  # again for each test, because a test may have ended it

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        self._called[id(frame.f_code)] = frame.f_code

    def _names(self) -> set[str]:
        called, self._called = tuple(self._called.values()), {}
        return {
            name_of(str(Path(code.co_filename).relative_to(Path.cwd())), code.co_qualname)
            for code in called
            if code.co_filename.startswith(self._package)
        }

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._shared |= self._names()
        self._start()
        started = time.process_time()
        result = yield
        self._tests[item.nodeid] = (time.process_time() - started, self._names())
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[object]:
        if fixturedef.scope == "function":
            return (yield)
        before, self._called = self._called, {}
        result = yield
        fixture = dict(self._called)
        self._shared |= self._names()
        self._called = before | fixture
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._not_passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        sys.settrace(None)
        passed = {
            test: {"seconds": round(seconds, 3), "functions": sorted(functions)}
            for test, (seconds, functions) in self._tests.items()
            if test not in self._not_passed
        }
        self._file.write_text(json.dumps({"shared": sorted(self._shared), "tests": passed}))
