"""The argument parser of the scripts, and what runs a script.

Each command is a module with `add_commands(add)`. `add` makes a parser from a command's name and help; the module adds
its arguments and sets `run`, a function that takes the parsed arguments and returns the exit status. Heavy packages
(MLX, FastAPI) are imported inside that function, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from mlx_parallm.errors import ConfigError, ParaLLMError

AddCommand = Callable[[str, str], argparse.ArgumentParser]
"""Adds a command: (name, help) → its parser."""


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


def subcommands(parser: argparse.ArgumentParser) -> AddCommand:
    """A function that adds commands to `parser`, which prints its help if none of them is given."""

    def print_help(args: argparse.Namespace) -> int:
        parser.print_help()
        return 2

    parser.set_defaults(run=print_help)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    return lambda name, text: commands.add_parser(name, help=text, description=text)


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number of at least `least`, which is not negative."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, {least} at least, got {text!r}")
        return int(text)

    return parse


def run(parser: Parser, argv: Sequence[str] | None) -> int:
    """Runs the command that `argv` names. Its exit status: 0, 1 after a failure, 2 if an argument or a setting must be
    changed, 130 after Ctrl-C."""
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
