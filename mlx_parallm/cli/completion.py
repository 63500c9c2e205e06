"""`mlx_parallm completion`: the script by which a shell completes the arguments of our three programs."""

from __future__ import annotations

from argparse import Namespace

from mlx_parallm.cli import main
from mlx_parallm.cli.parser import Parser, all_parsers
from mlx_parallm.errors import ConfigError

_SHELLS = ("bash", "zsh", "tcsh")
_PROGRAMS = {
    "mlx_parallm": main.main_parser,
    "mlx_parallm_serve": main.serve_parser,
    "mlx_parallm_train": main.train_parser,
}


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("shell", choices=_SHELLS, help="The shell that reads the script.")
    name = "The program whose arguments are completed. Default: %(default)s."
    parser.add_argument("--program", default="mlx_parallm", metavar="NAME", help=name)
    parser.set_defaults(run=print_completion)


def print_completion(args: Namespace) -> int:
    """Prints the script.

    Raises:
        ConfigError: no such program.
    """
    import shtab

    if args.program not in _PROGRAMS:
        raise ConfigError(f"--program: must be one of {', '.join(_PROGRAMS)}, got {args.program!r}")
    print(shtab.complete(all_parsers(_PROGRAMS[args.program]()), args.shell))
    return 0
