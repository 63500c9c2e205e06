"""Makes the entry points of a package's pyproject.toml known to programs that the pages start, without installing it.

python install_editable.py FOLDER: `uv pip install --editable` of the pages. Writes to `site/` in the current folder,
which is on the PYTHONPATH of every program of the pages.
"""

import sys
import tomllib
from pathlib import Path

folder = Path(sys.argv[1]).resolve()
project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
site = Path("site")
information = site / f"{project['name']}-{project['version']}.dist-info"
information.mkdir(parents=True)
(information / "METADATA").write_text(
    f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n"
)
groups = (
    f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
    for group, entries in project["entry-points"].items()
)
(information / "entry_points.txt").write_text("\n".join(groups))
for module in folder.glob("*.py"):
    (site / module.name).write_text(module.read_text())
