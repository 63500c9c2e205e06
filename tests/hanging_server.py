"""`mlx_parallm_serve` whose device hangs in a piece of work of a stage, once each time a file names the stage.

python hanging_server.py FILE [flags]     FILE then gets for example "_forward" or "_train with the lock"
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

from mlx_parallm.cli.main import serve
from mlx_parallm.engine.engine import Engine

STAGES = ("_forward", "_stage", "_train")
FOREVER_S = 10_000


def hanging(name: str, order: Path) -> None:
    """Has this method of the engine hang when the file orders it."""
    run = getattr(Engine, name)

    def hang_or_run(self: Engine, unit: Any) -> None:
        if order.exists() and (words := order.read_text().split(maxsplit=1))[0] == name:
            order.unlink()
            library = ctypes.PyDLL if words[1:] else ctypes.CDLL  # the first keeps the interpreter lock
            library(None).sleep(FOREVER_S)
        run(self, unit)

    setattr(Engine, name, hang_or_run)


if __name__ == "__main__":
    for stage in STAGES:
        hanging(stage, Path(sys.argv[1]))
    sys.exit(serve(sys.argv[2:]))
