"""examples/serve_and_train.py, on a tiny model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_and_train.py"


@pytest.mark.timeout(300)
def test_it_serves_and_trains_without_http(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "model")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rounds = [re.match(r"(\S+) answers .*; reward (-\d\.\d\d), (\w+)", line) for line in done.stdout.splitlines()]
    assert [found and found.group(1, 3) for found in rounds] == [
        ("base@0", "published"),
        *((f"default@{version}", "published") for version in range(1, 5)),
    ]
