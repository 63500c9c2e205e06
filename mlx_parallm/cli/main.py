"""The three scripts: `mlx_parallm_serve`, `mlx_parallm_train`, and `mlx_parallm` with its commands."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from mlx_parallm.cli.parser import Parser, all_parsers, argument, later, run, subcommands, takes
from mlx_parallm.errors import ConfigError


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
    return Parser(_SERVE, prog="mlx_parallm_serve", description=_SERVE_HELP)


def train_parser() -> Parser:
    """The arguments of `mlx_parallm_train`."""
    return Parser(_TRAIN, prog="mlx_parallm_train", description=_TRAIN_HELP)


def main_parser() -> Parser:
    """The commands of `mlx_parallm`."""
    about = "One resident model on MLX, served to many clients in one batch."
    return Parser(subcommands(*_COMMANDS), prog="mlx_parallm", description=about).filled()


_PROGRAMS = {"mlx_parallm": main_parser, "mlx_parallm_serve": serve_parser, "mlx_parallm_train": train_parser}
_SHELL = "The shell that reads the script."
_PROGRAM = "The program whose arguments are completed. Default: %(default)s."


@takes(
    argument("shell", choices=("bash", "zsh", "tcsh"), help=_SHELL),
    argument("--program", default="mlx_parallm", metavar="NAME", help=_PROGRAM),
)
def _completion(args: Namespace) -> int:
    """Prints the script by which a shell completes the arguments of a program.

    Raises:
        ConfigError: no such program.
    """
    import shtab

    if args.program not in _PROGRAMS:
        raise ConfigError(f"--program: must be one of {', '.join(_PROGRAMS)}, got {args.program!r}")
    print(shtab.complete(all_parsers(_PROGRAMS[args.program]()), args.shell))
    return 0


_SERVE, _TRAIN = later("serve", "serve"), later("train", "train")
_SERVE_HELP = "Serve a model and its LoRA adapters to OpenAI clients, many at once."
_TRAIN_HELP = "Train an adapter on the tasks of an environment, without clients and without a server."
_COMMANDS = (
    ("serve", _SERVE_HELP, _SERVE),
    ("train", _TRAIN_HELP, _TRAIN),
    ("launch", "Run a coding agent on a server, which is started if none runs.", later("launch", "COMMANDS")),
    ("chat", "Talk with a running server; with two adapters side by side, too.", later("chat", "chat")),
    ("ps", "Show what a running server is doing.", later("status", "ps")),
    ("usage", "Show what the keys of a running server have used.", later("status", "usage")),
    ("keys", "Make, list and remove the named keys of a server.", later("keys", "COMMANDS")),
    (
        "bench",
        "Measure how fast a server is, this or another one with OpenAI's API; with --report, this machine.",
        later("bench", "bench"),
    ),
    ("training", "Watch and control the training of a running server.", later("training", "COMMANDS")),
    (
        "adapters",
        "Manage the LoRA adapters of a running server; export or average adapters.",
        later("adapters", "COMMANDS"),
    ),
    ("forget", "Build an adapter anew without some of what it has learnt from.", later("forget", "forget")),
    ("why", "Show what a version learnt from, or what pushed an answer.", later("why", "why")),
    ("reward-model", "Train a reward model on preferences. Needs no server.", later("reward_model", "train")),
    (
        "runs",
        "List the training runs below a folder: state, steps, rewards, and why each ended.",
        later("train", "list_runs"),
    ),
    ("version", "Print the versions to give in a bug report.", later("machine", "version")),
    ("doctor", "Check the device and its speed, or test the engine on it.", later("machine", "doctor")),
    ("list", "List the models on this machine.", later("models", "list_models")),
    ("check", "Compare a model's first layers with mlx-lm: batches, adapters, gradients.", later("models", "check")),
    ("pull", "Download a model from the hub, so that a server starts with it at once.", later("models", "pull")),
    (
        "tokenizer",
        "Write the tokenizer of a model for clients that tokenise by themselves.",
        later("models", "TOKENIZER"),
    ),
    ("service", "Run a server from login on, without a terminal. On macOS.", later("service", "COMMANDS")),
    ("completion", "Print a script by which a shell completes arguments.", _completion),
)
"""The commands of `mlx_parallm` in the order of its help: name, help, command."""
