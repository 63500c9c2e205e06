"""The three scripts: `mlx_parallm_serve`, `mlx_parallm_train`, and `mlx_parallm` with its commands.

Adding a command: see `parser`, and add its module to `main_parser` below.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from mlx_parallm.cli import adapter_files, completion, keys, machine, reward_model, runs
from mlx_parallm.cli import train as training
from mlx_parallm.cli.flags import TRAIN_ONLY, add_flags, settings
from mlx_parallm.cli.parser import Parser, run, subcommands
from mlx_parallm.cli.remote import adapters, bench, chat, status, top, usage
from mlx_parallm.cli.remote import training as remote_training
from mlx_parallm.cli.service import command as service
from mlx_parallm.cli.table import add_json_argument
from mlx_parallm.config import render, resolve

_SERVE_HELP = "Serve a model and its LoRA adapters to OpenAI clients, many at once."
_TRAIN_HELP = "Train an adapter on the tasks of an environment, without clients and without a server."


def serve(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_serve`."""
    return run(serve_parser(), argv)


def train(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_train`."""
    return run(train_parser(), argv)


def main(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm`."""
    return run(main_parser(), argv)


def serve_parser() -> Parser:
    """The arguments of `mlx_parallm_serve`."""
    parser = Parser(prog="mlx_parallm_serve", description=_SERVE_HELP)
    _add_serve_arguments(parser)
    return parser


def train_parser() -> Parser:
    """The arguments of `mlx_parallm_train`."""
    parser = Parser(prog="mlx_parallm_train", description=_TRAIN_HELP)
    training.add_arguments(parser)
    return parser


def main_parser() -> Parser:
    """The commands of `mlx_parallm`."""
    parser = Parser(prog="mlx_parallm", description="One resident model on MLX, served to many clients in one batch.")
    add = subcommands(parser)
    _add_serve_arguments(add("serve", _SERVE_HELP))
    training.add_arguments(add("train", _TRAIN_HELP))
    chat.add_arguments(add("chat", "Talk with a running server; with two adapters side by side, too."))
    status.add_arguments(add("ps", "Show what a running server is doing."))
    top.add_arguments(add("top", "Watch a running server: load, latencies, memory, the device's time, and training."))
    usage.add_arguments(add("usage", "Show what the keys of a running server have used."))
    keys.add_commands(subcommands(add("keys", "Make, list and remove the named keys of a server.")))
    of_speed = "Measure how fast a server is, this or another one with OpenAI's API; with --report, this machine."
    bench.add_arguments(add("bench", of_speed))
    remote_training.add_commands(subcommands(add("training", "Watch and control the training of a running server.")))
    of_adapters = "Manage the LoRA adapters of a running server; merge, convert or average adapters."
    add_adapters = subcommands(add("adapters", of_adapters))
    adapters.add_commands(add_adapters)
    adapter_files.add_commands(add_adapters)
    reward_model.add_arguments(add("reward-model", "Train a reward model on preferences. Needs no server."))
    listing = add("runs", "List the training runs below a folder: state, steps, last reward, and why each ended.")
    listing.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="Default: ./checkpoints.")
    add_json_argument(listing)
    listing.set_defaults(run=runs.list_runs)
    machine.add_commands(add)
    service.add_commands(subcommands(add("service", "Run a server from login on, without a terminal. On macOS.")))
    scripts = {"mlx_parallm": main_parser, "mlx_parallm_serve": serve_parser, "mlx_parallm_train": train_parser}
    completing = add("completion", "Print a script by which a shell completes arguments.")
    completion.add_arguments(completing, lambda: {name: make() for name, make in scripts.items()})
    return parser


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, without=TRAIN_ONLY)
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    resolved = resolve(settings(args), os.environ, args.config)
    if args.print_config:
        print(render(resolved), end="")
        return 0
    from mlx_parallm.app.server import run as run_server

    return run_server(resolved.config)
