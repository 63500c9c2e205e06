"""The argument parser of the scripts, and what a command is.

A command is a function that fills a parser: `takes` makes one of a function with its arguments beside it, `subcommands`
one of other commands. The module of a command is imported when the command is chosen, and heavy packages (MLX, FastAPI)
when it runs, so that every `--help` is quick.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn, Self

from mlx_parallm.errors import ConfigError, ParaLLMError

Argument = Callable[[argparse._ActionsContainer], object]
"""Adds an argument to a parser or to a group of one."""

Command = Callable[["Parser"], object]
"""Adds the arguments of a command to its parser, and sets `run`."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError for wrong arguments and suggests the flag that was probably meant.

    Flags cannot be abbreviated. `command` is called when the parser is first used. `refused`: flags that other programs
    have and this one would not obey, each with the program that has it.
    """

    def __init__(self, command: Command, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._command: Command | None = command
        self.refused: Mapping[str, str | None] = {}

    def filled(self) -> Self:
        """This parser with its arguments."""
        if (command := self._command) is not None:
            self._command = None
            command(self)
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


def argument(*names: str, **options: Any) -> Argument:
    """An argument, with the options of `ArgumentParser.add_argument`."""
    return lambda parser: parser.add_argument(*names, **options)


def group(title: str, *arguments: Argument, description: str | None = None) -> Command:
    """Arguments that the help shows together, under a title."""

    def add(parser: Parser) -> None:
        added = parser.add_argument_group(title, description)
        for each in arguments:
            each(added)

    return add


def takes(*arguments: Command) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Makes a command of a function, which gets the parsed arguments and returns the exit status."""

    def command_of(run: Callable[[argparse.Namespace], int]) -> Command:
        def add(parser: Parser) -> None:
            for each in arguments:
                each(parser)
            parser.set_defaults(run=run)

        return add

    return command_of


def subcommands(*commands: tuple[str, str, Command]) -> Command:
    """A command that has others below it, each with its name and its help. Without one of them it prints its help."""

    def add(parser: Parser) -> None:
        def print_help(args: argparse.Namespace) -> int:
            parser.print_help()
            return 2

        parser.set_defaults(run=print_help)
        added = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
        for name, text, command in commands:
            added.add_parser(name, help=text, description=text, command=command)

    return add


def later(module: str, name: str) -> Command:
    """The command of this name in a module of this package, which is imported when the command is chosen."""
    return lambda parser: getattr(import_module(f"mlx_parallm.cli.{module}"), name)(parser)


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
