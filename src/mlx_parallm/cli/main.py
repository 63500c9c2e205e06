"""The three scripts. Each returns its exit status: 2 for a configuration to be changed, 1 for a failure."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from mlx_parallm.cli import commands
from mlx_parallm.cli.flags import add_flags, settings
from mlx_parallm.cli.parser import Parser
from mlx_parallm.config import API_KEY_VARIABLE, Mode, Setting, render, resolve
from mlx_parallm.errors import ConfigError, ParaLLMError

_SERVE_HELP = "Serve a model to OpenAI clients, many at once."
_TRAINING = {"server.mode": Setting(Mode.TRAINING_ONLY.value, "mlx_parallm_train")}


def serve(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_serve`."""
    parser = Parser(prog="mlx_parallm_serve", description=_SERVE_HELP)
    add_flags(parser)
    parser.set_defaults(run=_serve)
    return _run(parser, argv)


def train(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_train`: the same server with `server.mode` training_only."""
    parser = Parser(prog="mlx_parallm_train", description="Train adapters. Not available in this version.")
    add_flags(parser, without=_TRAINING)
    parser.set_defaults(run=lambda args: _serve(args, _TRAINING))
    return _run(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm`."""
    parser = Parser(prog="mlx_parallm", description="One resident model, served to many clients in one batch on MLX.")
    parser.set_defaults(run=lambda args: _print_help(parser))
    add = parser.add_subparsers(title="commands", metavar="COMMAND").add_parser
    serving = add("serve", help=_SERVE_HELP, description=_SERVE_HELP)
    add_flags(serving)
    serving.set_defaults(run=_serve)
    add("doctor", help="Check device, BLAS and speed.").set_defaults(run=lambda args: commands.doctor())
    add("list", help="List the models on this machine.").set_defaults(run=lambda args: commands.list_models())
    asking = add("ps", help="Show what a running server is doing.")
    asking.add_argument("--url", default="http://127.0.0.1:8000", help="The server's address. Default: %(default)s.")
    asking.add_argument("--api-key", metavar="KEY", help=f"The server's key. Default: ${API_KEY_VARIABLE}.")
    asking.set_defaults(run=lambda args: commands.ps(args.url, args.api_key or os.environ.get(API_KEY_VARIABLE)))
    add("version", help="Print the versions that matter in a report.").set_defaults(run=lambda args: commands.version())
    return _run(parser, argv)


def _serve(args: argparse.Namespace, fixed: Mapping[str, Setting] | None = None) -> int:
    resolved = resolve(settings(args) | dict(fixed or {}), os.environ, args.config)
    if args.print_config:
        print(render(resolved), end="")
        return 0
    from mlx_parallm.app import run

    return run(resolved.config)


def _print_help(parser: Parser) -> int:
    parser.print_help()
    return 2


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
