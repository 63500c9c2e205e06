"""`mlx_parallm runs`: the training runs below a folder."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.cli.parser import Parser
from mlx_parallm.cli.table import add_json_argument, show, table
from mlx_parallm.cli.train_table import with_interval
from mlx_parallm.errors import ConfigError

if TYPE_CHECKING:
    from mlx_parallm.rl.runs.listing import RunSummary

_COLUMNS = ("run", "state", "steps", "reward", "evaluation", "adapter", "seed", "last update", "why")


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
    where = "A folder of runs, or that of one run. Default: ./checkpoints and ./runs."
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=where)
    add_json_argument(parser)
    parser.set_defaults(run=list_runs)


def list_runs(args: Namespace) -> int:
    """Prints one line for each run, oldest first in each folder. Running processes are not disturbed.

    Raises:
        ConfigError: there is no such folder.
    """
    from mlx_parallm.adapters.runs import FOLDERS
    from mlx_parallm.rl.runs import listing

    if args.folder is not None and not args.folder.is_dir():
        raise ConfigError(f"{args.folder} is no folder; name the one that holds runs, or the folder of one run")
    folders = FOLDERS if args.folder is None else (args.folder,)
    found = [run for folder in folders for run in listing.list_runs(folder)]
    hint = "mlx_parallm_train makes one" + ("; `mlx_parallm runs DIR` looks elsewhere" if args.folder is None else "")
    none = f"no runs below {' and '.join(map(str, folders))}; {hint}"
    return show(args, [asdict(one) for one in found], lambda: table([_COLUMNS, *map(_row, found)]) if found else none)


def _row(run: RunSummary) -> tuple[str, ...]:
    at = None if run.at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.at))
    cells = (
        run.path,
        run.state.value,
        run.steps,
        None if run.reward is None else f"{run.reward:.3f}",
        None if run.evaluation is None else with_interval(*run.evaluation),
        run.adapter,
        run.seed,
        at,
        " ".join(run.reason.split()) or None,
    )
    return tuple("-" if cell is None else str(cell) for cell in cells)
