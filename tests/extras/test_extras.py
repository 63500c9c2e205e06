"""A server starts, answers and makes an update without each of the extras of training, and without all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules

import pytest

from mlx_parallm import extras

NAMES = [module.name for module in iter_modules(extras.__path__)]


def serve_without(folder: Path, package: str) -> None:
    program = Path(__file__).with_name("without_extras.py")
    done = subprocess.run([sys.executable, program, folder, package], capture_output=True, text=True, timeout=200)
    assert "served and trained without" in done.stdout, done.stderr[-4000:]


@pytest.mark.timeout(240)
def test_a_server_needs_none_of_the_extras(tmp_path: Path) -> None:
    serve_without(tmp_path, extras.__name__)


@pytest.mark.ci
@pytest.mark.timeout(240)
@pytest.mark.parametrize("extra", NAMES)
def test_a_server_runs_without_an_extra(tmp_path: Path, extra: str) -> None:
    serve_without(tmp_path, f"{extras.__name__}.{extra}")
