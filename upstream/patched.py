"""Copies the installed mlx-lm to a folder and applies the patches beside this file.

python upstream/patched.py FOLDER
cd FOLDER && python -m unittest discover tests
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

PATCHES = sorted(Path(__file__).parent.glob("*.patch"))


def copy_patched(folder: Path) -> None:
    """Writes a patched copy of mlx-lm, and the patches' tests, to this folder."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / "mlx_lm", ignore=shutil.ignore_patterns("__pycache__"))
    # A repository of its own, so that git does not look for one around the folder and skip the files.
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    for patch in PATCHES:
        subprocess.run(["git", "-C", str(folder), "apply", str(patch.resolve())], check=True)


if __name__ == "__main__":
    copy_patched(Path(sys.argv[1]))
