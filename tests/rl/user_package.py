"""A user's installed package with entry points: `from rl.user_package import install`."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, module: str, source: str, group: str, *names: str) -> None:
    """Writes a module and the dist-info that installs it; each of `names` is an entry point to the object so called.

    A name `a=b` is the entry point a to the object b.
    """
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    points = (name.partition("=") for name in names)
    lines = [f"{name} = {module}:{target or name}" for name, _, target in points]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
