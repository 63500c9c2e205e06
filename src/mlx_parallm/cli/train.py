"""What `mlx_parallm_train` does: runs training on an environment's tasks, shows it, and keeps the record."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from mlx_parallm.cli import curves
from mlx_parallm.cli.flags import add_flags, settings
from mlx_parallm.cli.train_table import summary
from mlx_parallm.cli.train_view import RichTrainView, TrainOptions, TrainView
from mlx_parallm.cli.update_log import UpdateLog
from mlx_parallm.config import Config, Mode, Resolved, Setting, render, resolve
from mlx_parallm.core import UpdateReport
from mlx_parallm.errors import ConfigError

HELP = "Train an adapter on the tasks of an environment: no client, no server."

_FIXED = {
    "server.mode": Setting(Mode.TRAINING_ONLY.value, "mlx_parallm_train"),
    "rl_training.enabled": Setting(True, "mlx_parallm_train"),
}
_HTTP = ("host", "port", "max_queued", "api_key", "allowed_hosts", "cors_origins", "served_model_name")
_UNUSED = frozenset(
    (
        *_FIXED,
        *(f"server.{name}" for name in (*_HTTP, "shutdown_timeout")),
        *("adapters.serve", "adapters.allowed_adapter_roots", "rl_training.update_frequency"),
    )
)
"""Keys whose flags a run has no use for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what a run takes, and the flags of every setting that it has a use for."""
    group = parser.add_argument_group("run")
    add = group.add_argument
    steps = "Steps of the whole run, one update each; has to be given. A resumed run makes those that are left."
    add("--steps", type=_count(1), metavar="N", help=steps)
    add("--group-size", type=_count(2), default=8, metavar="N", help="Samples a prompt. Default: %(default)s.")
    add("--prompts-per-step", type=_count(1), default=4, metavar="N", help="Prompts a step. Default: %(default)s.")
    add(
        "--log",
        type=Path,
        default=Path("training.jsonl"),
        metavar="FILE",
        help="JSONL file to which each update is added. Default: %(default)s.",
    )
    add(
        "--plot",
        type=Path,
        default=Path("training.png"),
        metavar="FILE",
        help="PNG of the curves, written at the end over what is there. Default: %(default)s.",
    )
    add_flags(parser, without=_UNUSED)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Trains as the arguments say.

    Raises:
        ConfigError: an argument or a setting is missing or cannot be used.
        ParaLLMError: what the run raises.
    """
    resolved = _resolve(args)
    if args.print_config:
        print(render(resolved), end="")
        return 0
    options = _options(args, resolved.config)
    _refuse_unwritable(args.plot)
    with UpdateLog(args.log) as log:
        return _record(resolved.config, options, log, args.plot)


def _resolve(args: argparse.Namespace) -> Resolved:
    update = Setting(args.group_size * args.prompts_per_step, "--group-size and --prompts-per-step")
    fixed = {**_FIXED, "rl_training.update_frequency": update}
    return resolve(settings(args) | fixed, os.environ, args.config)


def _options(args: argparse.Namespace, config: Config) -> TrainOptions:
    environment = config.rl_training.environment
    problems = []
    if environment is None:
        problems.append("--environment: name what to train on, such as reasoning_gym:leg_counting")
    if args.steps is None:
        problems.append("--steps: say how many updates to make")
    if problems or environment is None:
        raise ConfigError("\n".join(problems))
    return TrainOptions(environment, args.steps, args.group_size, args.prompts_per_step)


def _record(config: Config, options: TrainOptions, log: UpdateLog, plot: Path) -> int:
    """The run itself. One that fails or is interrupted leaves its curves too."""
    from mlx_parallm.app.train import run as train

    view = RichTrainView(options.steps)
    recorded = _RecordedView(view, log)
    try:
        with view:
            return train(config, options, recorded)
    finally:
        if recorded.reports:
            _close(recorded, options.environment, log.path, plot)


def _close(recorded: _RecordedView, title: str, log: Path, plot: Path) -> None:
    reports = recorded.reports
    print(summary(reports))
    if "checkpoints" in recorded.facts:
        print(f"checkpoints in {recorded.facts['checkpoints']}")
    print(f"updates in {log}")
    try:
        curves.draw(reports, plot, title)
    except OSError as error:
        _say(f"WARNING: {plot} could not be written: {error.strerror}")
    else:
        print(f"curves in {plot}")


class _RecordedView:
    """A view that keeps what it is told: in memory, and in the log."""

    def __init__(self, view: TrainView, log: UpdateLog) -> None:
        self._view = view
        self._log = log
        self.reports: list[UpdateReport] = []
        self.facts: Mapping[str, str] = {}
        self._made = 0
        self._failures: list[str] = []

    def started(self, facts: Mapping[str, str], made: int) -> None:
        self.facts, self._made = facts, made
        self._view.started(facts, made)

    def rollout(self, done: int, wanted: int) -> None:
        self._view.rollout(done, wanted)

    def task_failed(self, reason: str) -> None:
        self._failures.append(reason)
        self._view.task_failed(reason)

    def updated(self, report: UpdateReport) -> None:
        self.reports.append(report)
        self._log.write(self._made + len(self.reports), report, self._failures)
        self._failures = []
        self._view.updated(report)


def _refuse_unwritable(plot: Path) -> None:
    """Before hours of training, not after."""
    if plot.is_dir() or not os.access(plot.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--plot: {plot} cannot be written: name a file in a folder that is there and writable")


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, {least} at least, got {text!r}")
        return int(text)

    return parse


def _say(text: str) -> None:
    print(text, file=sys.stderr)
