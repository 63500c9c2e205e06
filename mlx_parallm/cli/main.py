"""The three scripts: `mlx_parallm_serve`, `mlx_parallm_train`, and `mlx_parallm` with its commands.

Adding a command: see `parser`, and add its module to `_COMMANDS`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.cli.parser import Parser, arguments_of, commands_of, run, subcommands

_SERVE_HELP = "Serve a model and its LoRA adapters to OpenAI clients, many at once."
_TRAIN_HELP = "Train an adapter on the tasks of an environment, without clients and without a server."
_OF_SPEED = "Measure how fast a server is, this or another one with OpenAI's API; with --report, this machine."
_COMMANDS = (
    ("serve", _SERVE_HELP, arguments_of("serve")),
    ("train", _TRAIN_HELP, arguments_of("train")),
    ("launch", "Run a coding agent on a server, which is started if none runs.", commands_of("remote.launch")),
    ("chat", "Talk with a running server; with two adapters side by side, too.", arguments_of("remote.chat")),
    ("ps", "Show what a running server is doing.", arguments_of("remote.status")),
    ("usage", "Show what the keys of a running server have used.", arguments_of("remote.usage")),
    ("keys", "Make, list and remove the named keys of a server.", commands_of("keys")),
    ("bench", _OF_SPEED, arguments_of("remote.bench")),
    ("training", "Watch and control the training of a running server.", commands_of("remote.training")),
    (
        "adapters",
        "Manage the LoRA adapters of a running server; merge, convert or average adapters.",
        commands_of("remote.adapters", "adapter_files"),
    ),
    ("reward-model", "Train a reward model on preferences. Needs no server.", arguments_of("reward_model")),
    ("runs", "List the training runs below a folder: state, steps, rewards, and why each ended.", arguments_of("runs")),
    ("version", "Print the versions to give in a bug report.", arguments_of("machine", "add_version")),
    ("doctor", "Check the device and its speed, or test the engine on it.", arguments_of("machine", "add_doctor")),
    ("list", "List the models on this machine.", arguments_of("machine", "add_list")),
    ("check", "Compare a model's first layers with mlx-lm: batches, adapters, gradients.", arguments_of("check")),
    (
        "pull",
        "Download a model from the hub, so that a server starts with it at once.",
        arguments_of("machine", "add_pull"),
    ),
    (
        "tokenizer",
        "Write the tokenizer of a model for clients that tokenise by themselves.",
        arguments_of("machine", "add_tokenizer"),
    ),
    ("service", "Run a server from login on, without a terminal. On macOS.", commands_of("service.command")),
    ("completion", "Print a script by which a shell completes arguments.", arguments_of("completion")),
)
"""Name, help, and what adds the arguments, in the order of the help."""


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
    return Parser(prog="mlx_parallm_serve", description=_SERVE_HELP, add_arguments=arguments_of("serve"))


def train_parser() -> Parser:
    """The arguments of `mlx_parallm_train`."""
    return Parser(prog="mlx_parallm_train", description=_TRAIN_HELP, add_arguments=arguments_of("train"))


def main_parser() -> Parser:
    """The commands of `mlx_parallm`."""
    parser = Parser(prog="mlx_parallm", description="One resident model on MLX, served to many clients in one batch.")
    add = subcommands(parser)
    for command in _COMMANDS:
        add(*command)
    return parser
