"""The script that counts what a request and a trajectory pass still finds where each begins and ends."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_tiny

SCRIPT = Path(__file__).parents[2] / "scripts" / "trace_path.py"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_both_ways_are_counted_on_a_tiny_model(tmp_path):
    save_tiny("llama", tmp_path / "model")
    command = [sys.executable, str(SCRIPT), "--model", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    completion, trajectory = re.findall(r"^(\w+): .*: (\d+) functions in (\d+) files", done.stdout, re.MULTILINE)
    assert (completion[0], trajectory[0]) == ("completion", "trajectory")
    assert "batch/kv/cache.py" in done.stdout
    assert int(completion[2]) > 5
    assert int(trajectory[2]) > 5
