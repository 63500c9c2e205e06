"""The argument parser of the scripts, and what runs a script.

Each command is a module with `add_arguments(parser)`, or with `add_commands(add)` if it has commands of its own. They
add arguments and set `run`, a function that takes the parsed arguments and returns the exit status. The module is
imported when its command is chosen, and heavy packages (MLX, FastAPI) inside `run`, so that every `--help` is quick.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn, Self

from mlx_parallm.errors import ConfigError, ParaLLMError

AddArguments = Callable[["Parser"], None]

AddCommand = Callable[[str, str], "Parser"]
"""Adds a command: (name, help) → its parser."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError for wrong arguments and suggests the flag that was probably meant.

    Flags cannot be abbreviated. `add_arguments` is called when the parser is first used. `refused`: flags that other
    programs have and this one would not obey, each with the program that has it.
    """

    def __init__(self, add_arguments: AddArguments | None = None, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._add_arguments = add_arguments
        self.refused: Mapping[str, str | None] = {}

    def filled(self) -> Self:
        """This parser with its arguments."""
        if (add_arguments := self._add_arguments) is not None:
            self._add_arguments = None
            add_arguments(self)
        return self

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def parse_known_args(  # type: ignore[override]  # argparse's overloads allow any namespace class
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Subcommands are parsed through here too, so that an unknown flag is compared with its own command's flags."""
        self.filled()
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0].partition("=")[0])
        return parsed, []

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        if program := self.refused.get(word.replace("--no-", "--", 1)):
            self.error(f"{word}: only {program} has this flag; leave it out")
        from difflib import get_close_matches

        close = get_close_matches(word, self._option_string_actions, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        self.error(f"{word}: unknown flag{hint}")


def subcommands(parser: argparse.ArgumentParser) -> Callable[..., Parser]:
    """A function that adds commands to `parser`, which prints its help if none of them is given: (name, help, what adds
    the arguments when the command is chosen) → its parser."""

    def print_help(args: argparse.Namespace) -> int:
        parser.print_help()
        return 2

    parser.set_defaults(run=print_help)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)

    def add(name: str, text: str, add_arguments: AddArguments | None = None) -> Parser:
        return commands.add_parser(name, help=text, description=text, add_arguments=add_arguments)

    return add


def arguments_of(module: str, function: str = "add_arguments") -> AddArguments:
    """Adds the arguments of a command: `function` of a module of this package."""
    return lambda parser: _imported(module, function)(parser)


def commands_of(*modules: str) -> AddArguments:
    """Adds commands below a command: `add_commands` of these modules."""

    def add_commands(parser: Parser) -> None:
        add = subcommands(parser)
        for module in modules:
            _imported(module, "add_commands")(add)

    return add_commands


def _imported(module: str, function: str) -> Callable[..., None]:
    found: Callable[..., None] = getattr(import_module(f"mlx_parallm.cli.{module}"), function)
    return found


def all_parsers(parser: Parser) -> Parser:
    """`parser` with its arguments and those of all its commands, for programs that read them."""
    for action in parser.filled()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                all_parsers(command)
    return parser


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
