"""What clients see of the faults of a cluster, as `benchmarks/studies/cluster_faults.py` makes them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FAULTS = (
    "replica stopped",
    "NATS stopped",
    "replica | head, vanish",
    "replica | all, vanish",
    "trainer | all, refused",
)


def test_clients_see_of_each_fault_what_is_promised(tmp_path: Path) -> None:
    study = [sys.executable, "-m", "benchmarks.studies.cluster_faults", "--times", "1", "--only", *FAULTS]
    ended = subprocess.run([*study, "--out", str(tmp_path / "record.json")], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-6000:]
