"""A plugin of pytest that notes which functions of the package each test calls, in all threads of its process.

It writes the seconds and the functions of each test that passes to the file that `MUTANTS_REACH` names, as JSON. What
a shared fixture calls counts for the first test that uses it.
"""

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

PACKAGE = str(Path.cwd() / "mlx_parallm") + os.sep

_called: set[CodeType] = set()
_tests: dict[str, dict[str, object]] = {}
_failed: set[str] = set()


def name_of(file: str, function: str) -> str:
    return f"{file}:{function}"


def _profile(frame: FrameType, event: str, argument: object) -> None:
    if event == "call":
        _called.add(frame.f_code)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    threading.setprofile(_profile)
    sys.setprofile(_profile)  # anew: Python ends it if a signal raises while `_profile` runs
    _called.clear()
    started = time.monotonic()
    result = yield
    functions = {
        name_of(str(Path(code.co_filename).relative_to(Path.cwd())), code.co_qualname)
        for code in tuple(_called)
        if code.co_filename.startswith(PACKAGE)
    }
    _tests[item.nodeid] = {"seconds": time.monotonic() - started, "functions": sorted(functions)}
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    sys.setprofile(None)
    passed = {test: what for test, what in _tests.items() if test not in _failed}
    Path(os.environ["MUTANTS_REACH"]).write_text(json.dumps(passed))
