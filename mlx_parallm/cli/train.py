"""The train command: its arguments, and a run whose updates are shown on the screen and kept in files."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from mlx_parallm.cli.flags import add_flags, settings
from mlx_parallm.cli.parser import Parser, at_least
from mlx_parallm.cli.train_view import RichTrainView
from mlx_parallm.config import TRAIN, Config, Mode, Resolved, Setting, render, resolve
from mlx_parallm.errors import ConfigError
from mlx_parallm.optional_packages import PLOTS

_FIXED = {
    "server.mode": Setting(Mode.TRAINING_ONLY.value, "mlx_parallm_train"),
    "rl_training.enabled": Setting(True, "mlx_parallm_train"),
}


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of a run, and the flags of all settings that have an effect on it."""
    group = parser.add_argument_group("run")
    add = group.add_argument
    steps = (
        "Number of updates of the whole run. A resumed run makes those that are left. Required, but for a run with "
        "--connect-to and without --environment, which goes on until it is stopped."
    )
    add("--steps", type=at_least(1), metavar="N", help=steps)
    add("--mode", choices=["rl"], default="rl", help="What kind of training. There is one: %(default)s.")
    add("--group-size", type=at_least(2), default=8, metavar="N", help="Samples of each prompt. Default: %(default)s.")
    add(
        "--prompts-per-step",
        type=at_least(1),
        default=4,
        metavar="N",
        help="Prompts for each update. Default: %(default)s.",
    )
    add(
        "--warm-up",
        type=at_least(0),
        default=0,
        metavar="N",
        help="Examples of the environment that the adapter imitates before the first step. Default: %(default)s.",
    )
    add(
        "--log",
        type=Path,
        metavar="FILE",
        help="JSONL file to which a line is appended for each update. Default: metrics.jsonl in the run's folder.",
    )
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="PNG of the curves of the whole run, written at the end. Default: training.png in the run's folder.",
    )
    add_flags(parser, TRAIN)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Trains as the arguments say.

    Raises:
        ConfigError: an argument or a setting is missing, or cannot be used.
        ParaLLMError: the run failed; see `app.train.run`.
    """
    resolved = _resolve(args)
    if args.print_config:
        print(render(resolved), end="")
        return 0
    environment = _check_required(args, resolved.config)
    _check_files(args)
    if not PLOTS.installed:
        print(f"WARNING: no curves will be drawn: {PLOTS.missing}", file=sys.stderr)
    from mlx_parallm.app import train as training
    from mlx_parallm.app.train_progress import ENDLESS, TrainOptions
    from mlx_parallm.cli.train_end import closing

    options = TrainOptions(
        environment, args.steps or ENDLESS, args.group_size, args.prompts_per_step, args.log, args.warm_up
    )
    view = RichTrainView(args.steps, evaluates=resolved.config.rl_training.evaluation.every is not None)
    stopped = False
    try:
        with view:
            status = training.run(resolved.config, options, view)
        stopped = status > 128
        return status
    except KeyboardInterrupt:
        stopped = True
        raise
    finally:  # a run that fails or is stopped has something to keep, too
        if view.folder is not None:
            for text in closing(resolved.config, view.folder, args, environment, stopped):
                print(text)


def _resolve(args: argparse.Namespace) -> Resolved:
    trajectories = Setting(args.group_size * args.prompts_per_step, "--group-size and --prompts-per-step")
    fixed = {**_FIXED, "rl_training.update_frequency": trajectories}
    return resolve(settings(args) | fixed, os.environ, args.config)


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
