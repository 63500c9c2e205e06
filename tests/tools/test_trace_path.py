"""The script that counts what requests, trajectories and decode steps pass finds where each begins and ends."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_tiny

SCRIPT = Path(__file__).parents[2] / "scripts" / "trace_path.py"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_all_ways_are_counted_on_a_tiny_model(tmp_path):
    save_tiny("llama", tmp_path / "model")
    command = [sys.executable, str(SCRIPT), "--model", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    totals = r"^(\w+): .*: (\d+) functions in (\d+) files"
    found = {name: int(files) for name, _, files in re.findall(totals, done.stdout, re.MULTILINE)}
    assert [*found] == ["start", "completion", "chat", "update", "trajectory", "decode"]
    assert "kv/cache.py" in done.stdout
    assert min(found.values()) > 5
    decoded = done.stdout[done.stdout.index("decode:") :]
    assert "refresh" not in decoded
