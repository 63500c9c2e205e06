"""The three scripts: `mlx_parallm_serve`, `mlx_parallm_train`, and `mlx_parallm` with its subcommands.

A script returns its exit status: 0, 1 after a failure, 2 if the configuration must be changed, 130 after Ctrl-C.

Adding a command: write a function in `commands.py` that takes the parsed arguments and returns the exit status, and
add it to `main` below. Commands import heavy packages (MLX, FastAPI) inside the function, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from mlx_parallm.cli import average, commands, reward_model, runs
from mlx_parallm.cli import train as training
from mlx_parallm.cli.flags import TRAIN_ONLY, add_flags, settings
from mlx_parallm.config import API_KEY_VARIABLE, render, resolve
from mlx_parallm.errors import ConfigError, ParaLLMError

_SERVE_HELP = "Serve a model and its LoRA adapters to OpenAI clients, many at once."
_TRAIN_HELP = "Train an adapter on the tasks of an environment, without clients and without a server."


def serve(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_serve`."""
    parser = Parser(prog="mlx_parallm_serve", description=_SERVE_HELP)
    _add_serve_arguments(parser)
    return _run(parser, argv)


def train(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_train`."""
    parser = Parser(prog="mlx_parallm_train", description=_TRAIN_HELP)
    training.add_arguments(parser)
    return _run(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm`."""
    parser = Parser(prog="mlx_parallm", description="One resident model on MLX, served to many clients in one batch.")
    add = _subcommands(parser)
    _add_serve_arguments(add("serve", _SERVE_HELP))
    training.add_arguments(add("train", _TRAIN_HELP))
    add("doctor", "Check the device, the BLAS and its speed.").set_defaults(run=commands.doctor)
    add("list", "List the models on this machine.").set_defaults(run=commands.list_models)
    listing = add("runs", "List the training runs below a folder: state, steps, last reward, and why each ended.")
    listing.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="Default: ./checkpoints.")
    listing.set_defaults(run=runs.list_runs)
    ps = add("ps", "Show what a running server is doing.")
    _add_server_arguments(ps)
    ps.set_defaults(run=commands.ps)
    _add_adapter_commands(
        add("adapters", "Manage the LoRA adapters of a running server; merge, convert or average adapters.")
    )
    reward_model.add_arguments(add("reward-model", "Train a reward model on preferences. Needs no server."))
    _add_tokenizer_command(add("tokenizer", "Write the tokenizer of a model for clients that tokenise by themselves."))
    add("version", "Print the versions to give in a bug report.").set_defaults(run=commands.version)
    return _run(parser, argv)


def _add_adapter_commands(parser: argparse.ArgumentParser) -> None:
    add = _subcommands(parser)

    listing = add("list", "List the adapters of a running server, its route and its slots.")
    _add_server_arguments(listing)
    listing.set_defaults(run=commands.list_adapters)

    loading = add("load", "Load an adapter into a running server.")
    loading.add_argument("name", metavar="NAME", help="The name by which requests select it.")
    loading.add_argument(
        "path", metavar="PATH", help="Its folder on this machine, or a path under the server's adapter folders."
    )
    loading.add_argument("--replace", action="store_true", help="Replace the adapter that has NAME (load_inplace).")
    _add_server_arguments(loading)
    loading.set_defaults(run=commands.load_adapter)

    unloading = add("unload", "Remove an adapter from a running server. Running requests finish with it.")
    unloading.add_argument("name", metavar="NAME", help="A name, or one version of it: NAME@VERSION.")
    _add_server_arguments(unloading)
    unloading.set_defaults(run=commands.unload_adapter)

    merging = add("merge", "Write a model with an adapter merged into its weights. Needs no server.")
    _add_folder_arguments(merging)
    merging.add_argument("--dequantize", action="store_true", help="Write a dense model instead of a quantized one.")
    merging.set_defaults(run=commands.merge_adapter)

    converting = add("convert", "Write an adapter in another program's format. Needs no server.")
    _add_folder_arguments(converting)
    converting.add_argument("--format", choices=("mlx-lm", "peft"), default="peft", help="Default: %(default)s.")
    converting.set_defaults(run=commands.convert_adapter)

    average.add_arguments(add("average", "Write the weighted mean of adapters, and evaluate it. Needs no server."))


def _add_tokenizer_command(parser: argparse.ArgumentParser) -> None:
    saving = _subcommands(parser)("save", "Write a folder that Transformers reads without a network. Needs no server.")
    saving.add_argument("output", type=Path, metavar="DIR", help="The folder to write. It must not exist.")
    saving.add_argument("--model-path", metavar="DIR_OR_HUB_ID", help="The model. Default: the bundled one.")
    saving.add_argument("--trust-remote-code", action="store_true", help="Run Python code that comes with the model.")
    saving.set_defaults(run=commands.save_tokenizer)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="The server's address. Default: %(default)s.")
    parser.add_argument("--api-key", metavar="KEY", help=f"The server's key. Default: ${API_KEY_VARIABLE}.")


def _add_folder_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", type=Path, metavar="ADAPTER_DIR", help="The adapter's folder, in either format.")
    parser.add_argument("output", type=Path, metavar="OUTPUT_DIR", help="The folder to write. It must not exist.")
    parser.add_argument("--model-path", metavar="DIR_OR_HUB_ID", help="The base model. Default: the bundled one.")


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, without=TRAIN_ONLY)
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    resolved = resolve(settings(args), os.environ, args.config)
    if args.print_config:
        print(render(resolved), end="")
        return 0
    from mlx_parallm.app.server import run

    return run(resolved.config)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError for wrong arguments and suggests the flag that was probably meant.

    Flags cannot be abbreviated.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def parse_known_args(  # type: ignore[override]  # argparse's overloads allow any namespace class
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Subcommands are parsed through here too, so that an unknown flag is compared with its own command's flags."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0].partition("=")[0])
        return parsed, []

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        close = get_close_matches(word, self._option_string_actions, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        self.error(f"{word}: unknown flag{hint}")


def _subcommands(parser: argparse.ArgumentParser) -> Callable[[str, str], argparse.ArgumentParser]:
    """A function (name, help) → parser that adds a subcommand. Without a subcommand, `parser` prints its help."""

    def print_help(args: argparse.Namespace) -> int:
        parser.print_help()
        return 2

    parser.set_defaults(run=print_help)
    commands_of_parser = parser.add_subparsers(title="commands", metavar="COMMAND")
    return lambda name, text: commands_of_parser.add_parser(name, help=text, description=text)


def _run(parser: Parser, argv: Sequence[str] | None) -> int:
    try:
        args = parser.parse_args(argv)
        status: int = args.run(args)
    except ParaLLMError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    return status
