"""The commands about training runs: train, whose updates are shown on the screen and kept in files, and runs."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.adapters.runs import FOLDERS, LATEST, METRICS
from mlx_parallm.cli import train_file
from mlx_parallm.cli.flags import flags_of, settings
from mlx_parallm.cli.parser import argument, at_least, group, takes
from mlx_parallm.cli.show import JSON, local_time, show, table, with_interval
from mlx_parallm.cli.train_view import RichTrainView, columns_of, draw_curves, summary
from mlx_parallm.config import KEYS, TRAIN, Config, Mode, Resolved, Setting, render, resolve
from mlx_parallm.errors import ConfigError
from mlx_parallm.optional_packages import PLOTS

if TYPE_CHECKING:
    from mlx_parallm.rl.runs.record import RunSummary
    from mlx_parallm.rl.tracking import Made

_FIXED = {
    "server.mode": Setting(Mode.TRAINING_ONLY.value, "mlx_parallm_train"),
    "rl_training.enabled": Setting(True, "mlx_parallm_train"),
}


@takes(
    group(
        "run",
        argument(
            "--steps",
            type=at_least(1),
            metavar="N",
            help="Number of updates of the whole run. A resumed run makes those that are left. Required, but for a run "
            "on a file, which passes over its rows, and for one with --connect-to and without --environment, which "
            "goes on until it is stopped.",
        ),
        argument("--mode", choices=["rl"], default="rl", help="What kind of training. There is one: %(default)s."),
        argument(
            "--group-size",
            type=at_least(2),
            default=8,
            metavar="N",
            help="Samples of each prompt. Default: %(default)s.",
        ),
        argument(
            "--prompts-per-step",
            type=at_least(1),
            default=4,
            metavar="N",
            help="Prompts for each update. Default: %(default)s.",
        ),
        argument(
            "--warm-up",
            type=at_least(0),
            default=0,
            metavar="N",
            help="Examples of the environment that the adapter imitates before the first step. Default: %(default)s.",
        ),
        argument(
            "--log",
            type=Path,
            metavar="FILE",
            help="JSONL file to which a line is appended for each update. Default: metrics.jsonl in the run's folder.",
        ),
        argument(
            "--plot",
            type=Path,
            metavar="FILE",
            help="PNG of the curves of the whole run, written at the end. Default: training.png in the run's folder.",
        ),
    ),
    train_file.FILE_FLAGS,
    flags_of(TRAIN),
)
def train(args: argparse.Namespace) -> int:
    """Trains as the arguments say.

    Raises:
        ConfigError: an argument or a setting is missing, cannot be used, or is not heeded.
        ParaLLMError: the run failed; see `app.train.run`.
    """
    kind = train_file.kind_of(args)
    train_file.check_flags(args, kind)
    resolved = _resolve(args, kind)
    if args.print_config:
        print(render(resolved), end="")
        return 0
    environment = getattr(args, kind) if kind else _check_required(args, resolved.config)
    _check_files(args)
    make, args.steps = train_file.run_of(args, kind, resolved.config) if kind else (None, args.steps)
    if not PLOTS.installed:
        print(f"WARNING: no curves will be drawn: {PLOTS.missing}", file=sys.stderr)
    from mlx_parallm.app import train as training
    from mlx_parallm.app.training_run import ENDLESS, TrainOptions

    options = TrainOptions(
        environment, args.steps or ENDLESS, args.group_size, args.prompts_per_step, args.log, args.warm_up
    )
    evaluates = resolved.config.rl_training.evaluation.every is not None
    view = RichTrainView(args.steps, columns=columns_of(kind, evaluates))
    stopped = False
    try:
        with view:
            status = training.run(resolved.config, options, view, make)
        stopped = status > 128
        return status
    except KeyboardInterrupt:
        stopped = True
        raise
    finally:  # a run that fails or is stopped has something to keep, too
        if view.folder is not None:
            for text in _closing(resolved.config, view.folder, args, environment, stopped):
                print(text)


def _resolve(args: argparse.Namespace, kind: str | None) -> Resolved:
    """`kind`: of the file that the run learns from; None: it learns from rollouts."""
    trajectories = Setting(args.group_size * args.prompts_per_step, "--group-size and --prompts-per-step")
    fixed = {**_FIXED, "rl_training.update_frequency": trajectories, **(train_file.fixed(kind) if kind else {})}
    flags = {**settings(args), **fixed}
    return resolve(flags, os.environ, args.config, train_file.defaults(kind, flags.get("adapters.init_from")))


def _check_required(args: argparse.Namespace, config: Config) -> str:
    """What the run trains on, for people. Raises ConfigError: a required argument is missing."""
    training = config.rl_training
    environment = training.environment or training.atropos_url
    cluster = config.cluster.connect_to
    problems = []
    if environment is None and cluster is None:
        problems.append("--environment: name what to train on, such as FILE.jsonl or reasoning_gym:leg_counting")
    if args.steps is None and (environment is not None or cluster is None):
        problems.append("--steps: say how many updates to make")
    if problems:
        raise ConfigError("\n".join(problems))
    return environment or f"requests to {cluster} with collect_trajectory"


def _check_files(args: argparse.Namespace) -> None:
    """Raises ConfigError: a file of the arguments cannot be written."""
    plot: Path | None = args.plot
    if plot is not None and (plot.is_dir() or not os.access(plot.parent, os.W_OK | os.X_OK)):
        raise ConfigError(f"--plot: {plot} cannot be written: name a file in a folder that is there and writable")
    try:
        if args.log is not None:
            args.log.open("ab").close()
    except OSError as error:
        raise ConfigError(f"--log: {args.log} cannot be written: {error.strerror}") from error


def _closing(config: Config, folder: Path, args: argparse.Namespace, title: str, stopped: bool) -> Iterator[str]:
    """The last lines of a run that has started. Draws its curves.

    Args:
        folder: of the run.
        stopped: whether a signal has ended it before its last step.
    """
    from mlx_parallm.rl.tracking import read_metrics

    log = args.log or folder / METRICS
    made = read_metrics(log)
    if stopped:
        yield _stopped(config, made, args.steps)
    if not made:
        return
    yield summary(made)
    yield f"checkpoints in {folder}"
    yield f"updates in {log}"
    if PLOTS.installed:
        yield _drawn(made, args.plot or folder / "training.png", title)
    yield from _next_commands(config, folder, train_file.kind_of(args) is not None)


def _stopped(config: Config, made: Sequence[Made], steps: int | None) -> str:
    done = max((each.step for each in made if each.is_update), default=0)
    named = config.checkpointing.checkpoint_dir is not None or config.checkpointing.resume
    again = "the same command" if named else "the same command with --resume"
    of_all = "" if steps is None else f" of {steps}"
    return f"stopped after {done}{of_all} steps; {again} continues" if made else "stopped before the first step"


def _drawn(made: Sequence[Made], plot: Path, title: str) -> str:
    try:
        draw_curves(made, plot, title)
    except OSError as error:
        return f"WARNING: {plot} could not be written: {error.strerror}"
    return f"curves in {plot}"


def _next_commands(config: Config, folder: Path, of_file: bool) -> Iterator[str]:
    """How to serve what was learnt, how to go on from a run on a file with rewards, and how to make a model of it;
    nothing without a checkpoint."""
    name, model = config.adapters.default_adapter, config.model
    try:
        checkpoint = folder / name / (folder / name / LATEST).read_text().strip()
    except OSError:
        return
    of_model = [] if model.base_model_path is None else ["--model-path", model.base_model_path]
    rank = config.adapters.max_lora_rank
    of_rank = ["--max-lora-rank", str(rank)] if rank > KEYS["adapters.max_lora_rank"].field.default else []
    serve = ["mlx_parallm", "serve", "--checkpoint-dir", str(folder), "--serve-adapter", name, *of_model, *of_rank]
    export = [
        "mlx_parallm",
        "adapters",
        "export",
        str(checkpoint),
        "--to",
        "fused",
        "--out",
        f"{name}-fused",
        *of_model,
    ]
    learn = ["mlx_parallm_train", "--init-from", str(checkpoint), *of_model]
    yield f"serve it with `{shlex.join(serve)}`"
    if of_file:
        yield f"go on with rewards: `{shlex.join(learn)} --environment FILE_OR_NAME --steps 100`"
    yield f"take it elsewhere with `{shlex.join(export)}`"


@takes(
    argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="A folder of runs, or that of one run. Default: ./checkpoints and ./runs.",
    ),
    JSON,
)
def list_runs(args: argparse.Namespace) -> int:
    """Prints one line for each run, oldest first in each folder. Running processes are not disturbed.

    Raises:
        ConfigError: there is no such folder.
    """
    from mlx_parallm.rl.runs.record import list_runs

    if args.folder is not None and not args.folder.is_dir():
        raise ConfigError(f"{args.folder} is no folder; name the one that holds runs, or the folder of one run")
    folders = FOLDERS if args.folder is None else (args.folder,)
    found = [run for folder in folders for run in list_runs(folder)]
    hint = "mlx_parallm_train makes one" + ("; `mlx_parallm runs DIR` looks elsewhere" if args.folder is None else "")
    none = f"no runs below {' and '.join(map(str, folders))}; {hint}"
    columns = ("run", "state", "steps", "reward", "evaluation", "adapter", "seed", "last update", "why")
    return show(args, [asdict(one) for one in found], table([columns, *map(_row, found)]) if found else none)


def _row(run: RunSummary) -> tuple[object, ...]:
    reward = None if run.reward is None else f"{run.reward:.3f}"
    evaluation = None if run.evaluation is None else with_interval(*run.evaluation)
    at = None if run.at is None else local_time(run.at)
    reason = " ".join(run.reason.split()) or None
    return run.path, run.state.value, run.steps, reward, evaluation, run.adapter, run.seed, at, reason
