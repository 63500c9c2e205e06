"""`mlx_parallm runs`: the training runs below a folder."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

from mlx_parallm.adapters.checkpoints.runs import ROOT
from mlx_parallm.cli.table import show, table
from mlx_parallm.errors import ConfigError

if TYPE_CHECKING:
    from mlx_parallm.rl.runs.listing import RunSummary

_COLUMNS = ("run", "state", "steps", "reward", "last update", "why")


def list_runs(args: Namespace) -> int:
    """Prints one line for each run, oldest first. Running processes are not disturbed.

    Raises:
        ConfigError: there is no such folder.
    """
    from mlx_parallm.rl.runs import listing

    folder = ROOT if args.folder is None else args.folder
    if args.folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name the one that holds runs, or the folder of one run")
    found = listing.list_runs(folder)
    none = f"no runs below {folder}; mlx_parallm_train makes one"
    return show(args, [asdict(one) for one in found], lambda: table([_COLUMNS, *map(_row, found)]) if found else none)


def _row(run: RunSummary) -> tuple[str, ...]:
    reward = "-" if run.reward is None else f"{run.reward:.3f}"
    at = "-" if run.at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.at))
    return (str(run.path), run.state.value, str(run.steps), reward, at, " ".join(run.reason.split()) or "-")
