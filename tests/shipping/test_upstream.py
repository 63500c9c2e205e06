"""The patches for mlx-lm in upstream/ apply to the installed version, and their own tests pass there."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UPSTREAM = ROOT / "upstream"


def test_the_readme_names_the_installed_version_and_each_patch() -> None:
    text = (UPSTREAM / "README.md").read_text()
    assert f"mlx-lm {importlib.metadata.version('mlx-lm')}" in text
    assert [path.name for path in UPSTREAM.glob("*.patch") if path.name not in text] == []


@pytest.mark.ci
def test_the_patches_pass_their_own_tests(tmp_path: Path) -> None:
    folder = tmp_path / "mlx-lm"
    subprocess.run([sys.executable, str(UPSTREAM / "patched.py"), str(folder)], check=True, timeout=60)
    assert len(list((folder / "tests").glob("test_*.py"))) == 2
    command = [sys.executable, "-m", "unittest", "discover", "tests"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "Ran 12 tests" in done.stderr
