"""`mlx_parallm completion`: the script by which a shell completes the arguments of our three programs."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Mapping

SHELLS = ("bash", "zsh", "tcsh")

Programs = Callable[[], Mapping[str, argparse.ArgumentParser]]


def add_arguments(parser: argparse.ArgumentParser, programs: Programs) -> None:
    """Adds the arguments of the command. `programs`: makes the parsers of all programs, by name."""
    parser.add_argument("shell", choices=SHELLS, help="The shell that reads the script.")
    name = "The program whose arguments are completed. Default: %(default)s."
    parser.add_argument("--program", default="mlx_parallm", metavar="NAME", help=name)
    parser.set_defaults(run=lambda args: print_completion(args, programs()))


def print_completion(args: Namespace, programs: Mapping[str, argparse.ArgumentParser]) -> int:
    """Prints the script.

    Raises:
        ConfigError: no such program.
    """
    import shtab

    from mlx_parallm.errors import ConfigError

    if args.program not in programs:
        raise ConfigError(f"--program: must be one of {', '.join(programs)}, got {args.program!r}")
    print(shtab.complete(programs[args.program], args.shell))
    return 0
