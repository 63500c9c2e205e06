"""The three scripts. Each returns its exit status: 2 for a configuration to be changed, 1 for a failure."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_parallm.cli import adapters, commands
from mlx_parallm.cli import train as training
from mlx_parallm.cli.client import Client
from mlx_parallm.cli.flags import TRAIN_ONLY, add_flags, settings
from mlx_parallm.cli.parser import Parser
from mlx_parallm.config import API_KEY_VARIABLE, render, resolve
from mlx_parallm.errors import ConfigError, ParaLLMError

_SERVE_HELP = "Serve a model to OpenAI clients, many at once."


def serve(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_serve`."""
    parser = Parser(prog="mlx_parallm_serve", description=_SERVE_HELP)
    _add_serving(parser)
    return _run(parser, argv)


def train(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_train`."""
    parser = Parser(prog="mlx_parallm_train", description=training.HELP)
    training.add_arguments(parser)
    return _run(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm`."""
    parser = Parser(prog="mlx_parallm", description="One resident model, served to many clients in one batch on MLX.")
    parser.set_defaults(run=lambda args: _print_help(parser))
    add = parser.add_subparsers(title="commands", metavar="COMMAND").add_parser
    _add_serving(add("serve", help=_SERVE_HELP, description=_SERVE_HELP))
    training.add_arguments(add("train", help=training.HELP, description=training.HELP))
    add("doctor", help="Check device, BLAS and speed.").set_defaults(run=lambda args: commands.doctor())
    add("list", help="List the models on this machine.").set_defaults(run=lambda args: commands.list_models())
    asking = add("ps", help="Show what a running server is doing.")
    _add_server(asking)
    asking.set_defaults(run=lambda args: commands.ps(_client(args)))
    _add_adapter_commands(add("adapters", help="The LoRA adapters of a running server; merge one into a model."))
    add("version", help="Print the versions that matter in a report.").set_defaults(run=lambda args: commands.version())
    return _run(parser, argv)


def _add_adapter_commands(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=lambda args: _print_help(parser))
    add = parser.add_subparsers(title="commands", metavar="COMMAND").add_parser

    listing = add("list", help="List the adapters of a running server, its route and its slots.")
    _add_server(listing)
    listing.set_defaults(run=lambda args: adapters.show(_client(args)))

    loading = add("load", help="Load an adapter into a running server.")
    loading.add_argument("name", metavar="NAME", help="What requests call it.")
    loading.add_argument("path", metavar="PATH", help="Its folder: here, or below the server's adapter folders.")
    loading.add_argument("--replace", action="store_true", help="Take over a NAME that is taken (load_inplace).")
    _add_server(loading)
    loading.set_defaults(run=lambda args: adapters.load(_client(args), args.name, args.path, args.replace))

    unloading = add("unload", help="Make a running server forget an adapter; running requests end undisturbed.")
    unloading.add_argument("name", metavar="NAME", help="A name, or one version of it: NAME@VERSION.")
    _add_server(unloading)
    unloading.set_defaults(run=lambda args: adapters.unload(_client(args), args.name))

    merging = add("merge", help="Write a model with an adapter in its weights. Needs no server.")
    merging.add_argument("adapter", type=Path, metavar="ADAPTER_DIR", help="The adapter's folder.")
    merging.add_argument("output", type=Path, metavar="OUTPUT_DIR", help="The folder to write, which is not there yet.")
    merging.add_argument("--model-path", metavar="DIR_OR_HUB_ID", help="The base model. Default: the bundled one.")
    merging.add_argument("--dequantize", action="store_true", help="Write the changed weights unquantized.")
    merging.set_defaults(run=lambda args: adapters.merge(args.adapter, args.output, args.model_path, args.dequantize))

    converting = add("convert", help="Write an adapter in another program's format. Needs no server.")
    converting.add_argument("adapter", type=Path, metavar="ADAPTER_DIR", help="The adapter's folder, of either format.")
    converting.add_argument("output", type=Path, metavar="OUTPUT_DIR", help="The folder to write, not there yet.")
    converting.add_argument("--format", choices=("mlx-lm", "peft"), default="peft", help="Default: %(default)s.")
    converting.add_argument("--model-path", metavar="DIR_OR_HUB_ID", help="The base model. Default: the bundled one.")
    converting.set_defaults(run=lambda args: adapters.convert(args.adapter, args.output, args.model_path, args.format))


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="The server's address. Default: %(default)s.")
    parser.add_argument("--api-key", metavar="KEY", help=f"The server's key. Default: ${API_KEY_VARIABLE}.")


def _client(args: argparse.Namespace) -> Client:
    return Client(args.url, args.api_key or os.environ.get(API_KEY_VARIABLE))


def _add_serving(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, without=TRAIN_ONLY)
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    resolved = resolve(settings(args), os.environ, args.config)
    if args.print_config:
        print(render(resolved), end="")
        return 0
    from mlx_parallm.app import run

    return run(resolved.config)


def _print_help(parser: argparse.ArgumentParser) -> int:
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
