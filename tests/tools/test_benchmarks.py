"""Every benchmark imports and shows its help, so that a change of the package cannot break one unseen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
COMMANDS = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("benchmarks/studies/*.py")])
SCRIPT = "# /// script"
"""How a program begins that has an environment of its own, with packages that are not here."""
LIBRARY = [path for path in ROOT.glob("benchmarks/lib/**/*.py") if not path.read_text().startswith(SCRIPT)]
MODULES = sorted(path.relative_to(ROOT).with_suffix("") for path in LIBRARY)

CODE = """
import importlib, runpy, sys
names, paths = sys.argv[1].split(), sys.argv[2:]
for name in names:
    importlib.import_module(name)
for path in paths:
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 0, path
    else:
        raise AssertionError(f"{path} did not stop after its help")
"""


def test_every_module_imports_and_every_command_shows_its_help():
    """In one process, which imports MLX once."""
    names = " ".join(".".join(module.parts) for module in MODULES)
    done = subprocess.run(
        [sys.executable, "-c", CODE, names, *map(str, COMMANDS)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage:") == len(COMMANDS)
    assert len(MODULES) > 30
