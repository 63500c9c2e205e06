"""The arguments of `mlx_parallm_train` for a run on the rows of a file: --sft, --dpo, --kto and what goes with them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mlx_parallm.cli.parser import argument, at_least, group
from mlx_parallm.config import KEYS, Config, Setting
from mlx_parallm.errors import AdapterFileError, ConfigError
from mlx_parallm.extras_table import needed

_ALGORITHMS = {"sft": "cross_entropy", "dpo": "dpo", "kto": "kto"}
_RATES = {"sft": 1e-4, "dpo": 1e-5, "kto": 1e-5}
"""Learning rates where nobody gives one: ten times those that are usual without LoRA."""
_RATE = "rl_training.optimizer.learning_rate"
_OF_FILES = ("batch_size", "epochs", "held_out", "held_out_every", "patience", "max_length", "long_rows")
"""What only a run on a file heeds. Nobody has given what is None; the defaults are those of the run."""
_ROWS = "A JSONL, JSON, CSV, TSV or parquet file, or a data set of the hub"


def _share_or_file(text: str) -> float | str:
    try:
        share = float(text)
    except ValueError:
        return text
    if not 0 <= share <= 0.5:
        raise argparse.ArgumentTypeError("must be a share of the rows, 0 to 0.5, or a file")
    return share


FILE_FLAGS = group(
    "rows of a file",
    argument("--sft", metavar="FILE_OR_ID", help=f"{_ROWS}: conversations, answers or texts to imitate."),
    argument("--dpo", metavar="FILE_OR_ID", help=f"{_ROWS}: chosen and rejected answers, learnt with DPO."),
    argument("--kto", metavar="FILE_OR_ID", help=f"{_ROWS}: answers with the label true or false, learnt with KTO."),
    argument(
        "--batch-size",
        type=at_least(1),
        metavar="ROWS",
        help="Most rows of an update. Default: 8.",
    ),
    argument(
        "--epochs",
        type=at_least(1),
        metavar="N",
        help="Passes over the rows, if --steps does not say how many updates to make. Default: 1.",
    ),
    argument(
        "--held-out",
        type=_share_or_file,
        metavar="SHARE_OR_FILE",
        help="Rows that are not trained on: a share of the file, at most 200 rows, or another file. 0: none. "
        "Default: 0.05.",
    ),
    argument(
        "--held-out-every",
        type=at_least(1),
        metavar="UPDATES",
        help="Updates between two held-out losses. Default: about ten in a run.",
    ),
    argument(
        "--patience",
        type=at_least(1),
        metavar="N",
        help="End after N held-out losses in a row that are no new low, and go back to the best version. Default: make "
        "all steps, and end with the last version.",
    ),
    argument(
        "--max-length",
        type=at_least(2),
        metavar="TOKENS",
        help="Most tokens of a row. Default: 2048.",
    ),
    argument(
        "--long-rows",
        choices=("leave-out", "cut"),
        help="What becomes of rows that are longer: left out, or cut off at the end. Default: leave-out.",
    ),
)


def kind_of(args: argparse.Namespace) -> str | None:
    """Which of --sft, --dpo and --kto is given; None: none. Raises ConfigError: there are several."""
    given = [kind for kind in _ALGORITHMS if getattr(args, kind) is not None]
    if len(given) > 1:
        raise ConfigError(f"--{given[1]}: give one of --sft, --dpo and --kto; the next run begins with --init-from")
    return given[0] if given else None


def check_flags(args: argparse.Namespace, kind: str | None) -> None:
    """Raises ConfigError: a flag is given that a run of this kind does not heed."""
    if kind and args.warm_up:
        raise ConfigError("--warm-up: only a run that learns from rollouts heeds it; leave it out")
    if not kind and (unheeded := [name for name in _OF_FILES if getattr(args, name) is not None]):
        flag = unheeded[0].replace("_", "-")
        raise ConfigError(
            f"--{flag}: only a run that learns from a file, with --sft, --dpo or --kto, heeds it; leave it out"
        )


def fixed(kind: str) -> Mapping[str, Setting]:
    """Settings that follow from the kind."""
    return {"rl_training.algorithm": Setting(_ALGORITHMS[kind], f"--{kind}")}


def defaults(kind: str | None, init_from: Setting | None) -> Mapping[str, Setting]:
    """Settings where no other source sets them: those of a file of this kind, and those of the adapter that the run
    begins with. Raises ConfigError: there is no adapter."""
    rate = {_RATE: Setting(_RATES[kind], f"default of --{kind}")} if kind else {}
    return {**rate, **({} if init_from is None else _settings_of(init_from))}


def _settings_of(init_from: Setting) -> Mapping[str, Setting]:
    from mlx_parallm.adapters.files import read_config
    from mlx_parallm.adapters.formats import trained_with
    from mlx_parallm.adapters.runs import adapter_in

    try:
        made = trained_with(read_config(adapter_in(Path(str(init_from.value)).expanduser()), None))
    except AdapterFileError as error:
        raise ConfigError(f"--init-from: {init_from.value}: {error}") from error
    found = {
        "model.lora_rank": made.rank,
        "model.lora_alpha": made.alpha,
        "model.lora_rslora": made.rslora,
        "adapters.max_lora_rank": max(made.rank, KEYS["adapters.max_lora_rank"].field.default),
        **({"model.lora_target_modules": made.targets} if made.targets else {}),
    }
    return {key: Setting(value, init_from.source) for key, value in found.items()}


def _given(**values: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def run_of(args: argparse.Namespace, kind: str, config: Config) -> tuple[Callable[..., Any], int]:
    """What makes the run, and its number of steps. Reads the file once.

    Raises:
        ConfigError: the file or an argument cannot be used.
    """
    training = config.rl_training
    of_rollouts = (training.environment, training.reward, training.atropos_url)
    if any(of_rollouts) or config.cluster.wanted:
        raise ConfigError(
            f"--{kind}: a run learns from a file or from rollouts; leave out --{kind}, or environment, "
            "reward, Atropos and cluster"
        )
    if args.epochs is not None and args.steps is not None:
        raise ConfigError("--epochs: --steps says already how long the run is; give one of them")
    data, run = needed("files.data", f"--{kind}"), needed("files.run", f"--{kind}")
    kinds = needed("files.forms", f"--{kind}").FileKind
    of_rows = _given(held_out=args.held_out, batch_size=args.batch_size, epochs=args.epochs)
    found = data.TrainingData(data.FileSettings(kinds(kind), getattr(args, kind), seed=training.seed, **of_rows))
    how = run.FileRunSettings(
        cuts=args.long_rows == "cut",
        **_given(longest=args.max_length, every=args.held_out_every, patience=args.patience),
    )
    if how.patience is not None and not found.held_out:
        raise ConfigError(
            "--patience: no row is held out, so the run cannot end early; give --held-out, or leave it out"
        )
    return partial(run.FileRun, data=found, settings=how), args.steps or found.steps
