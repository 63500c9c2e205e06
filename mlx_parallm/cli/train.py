"""The train command: its arguments, and a run whose updates are shown on the screen and kept in files."""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from mlx_parallm.cli.curves import draw_curves
from mlx_parallm.cli.flags import TRAIN, add_flags, settings
from mlx_parallm.cli.parser import Parser, at_least
from mlx_parallm.cli.train_table import summary
from mlx_parallm.cli.train_view import KEPT, RichTrainView
from mlx_parallm.config import Config, Mode, Resolved, Setting, render, resolve
from mlx_parallm.core import EvaluationResult, UpdateReport
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras import PLOTS

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
        default=Path("training.png"),
        metavar="FILE",
        help="PNG of the curves, written at the end. An older file is overwritten. Default: %(default)s.",
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
    if args.plot.is_dir() or not os.access(args.plot.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--plot: {args.plot} cannot be written: name a file in a folder that is there and writable")
    _check_log(args.log)
    if not PLOTS.installed:
        print(f"WARNING: no curves will be drawn: {PLOTS.missing}", file=sys.stderr)
    from mlx_parallm.app import train as training
    from mlx_parallm.app.atropos import ENDLESS
    from mlx_parallm.app.train_progress import TrainOptions

    options = TrainOptions(
        environment, args.steps or ENDLESS, args.group_size, args.prompts_per_step, args.log, args.warm_up
    )
    view = _RecordingView(args.steps, evaluates=resolved.config.rl_training.evaluation.every is not None)
    try:
        with view:
            return training.run(resolved.config, options, view)
    finally:  # a run that fails or is interrupted has curves too
        if view.reports:
            _finish(view, environment, args.plot)


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


def _check_log(log: Path | None) -> None:
    try:
        if log is not None:
            log.open("ab").close()
    except OSError as error:
        raise ConfigError(f"--log: {log} cannot be written: {error.strerror}") from error


def _finish(view: _RecordingView, title: str, plot: Path) -> None:
    print(summary(view.reports, view.first))
    for name, text in (("checkpoints", "checkpoints"), ("log", "updates")):
        if name in view.facts:
            print(f"{text} in {view.facts[name]}")
    if not PLOTS.installed:
        return
    try:
        draw_curves(view.reports, plot, title, view.first, view.before)
    except OSError as error:
        print(f"WARNING: {plot} could not be written: {error.strerror}", file=sys.stderr)
    else:
        print(f"curves in {plot}")


class _RecordingView(RichTrainView):
    """A RichTrainView that also keeps what the curves show, in memory."""

    def __init__(self, steps: int | None, evaluates: bool) -> None:
        super().__init__(steps, evaluates=evaluates)
        self.reports = deque[UpdateReport](maxlen=KEPT)
        self.facts: Mapping[str, str] = {}
        self.first: EvaluationResult | None = None
        self.before = 0

    def started(self, facts: Mapping[str, str], steps_done: int) -> None:
        super().started(facts, steps_done)
        self.facts, self.before = facts, steps_done

    def evaluated(self, result: EvaluationResult) -> None:
        super().evaluated(result)
        self.first = result

    def updated(self, report: UpdateReport) -> None:
        super().updated(report)
        self.reports.append(report)
