"""The commands for adapter files, which need no server: adapters merge, convert and average."""

from __future__ import annotations

import argparse
import shlex
from argparse import Namespace
from pathlib import Path

from mlx_parallm.cli import average
from mlx_parallm.cli.parser import AddCommand

_ADAPTER = "The adapter's folder, in either format; or a run, an adapter in it, and there `latest` or a tag."


def add_commands(add: AddCommand) -> None:
    """Adds the commands."""
    merging = add("merge", "Write a model with an adapter merged into its weights. Needs no server.")
    _add_folder_arguments(merging)
    merging.add_argument("--dequantize", action="store_true", help="Write a dense model instead of a quantized one.")
    merging.set_defaults(run=merge_adapter)

    converting = add("convert", "Write an adapter in another program's format. Needs no server.")
    _add_folder_arguments(converting)
    converting.add_argument("--format", choices=("mlx-lm", "peft"), default="peft", help="Default: %(default)s.")
    converting.set_defaults(run=convert_adapter)

    average.add_arguments(add("average", "Write the weighted mean of adapters, and evaluate it. Needs no server."))


def _add_folder_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", type=Path, metavar="ADAPTER_DIR", help=_ADAPTER)
    parser.add_argument("output", type=Path, metavar="OUTPUT_DIR", help="The folder to write. It must not exist.")
    parser.add_argument("--model-path", metavar="DIR_OR_HUB_ID", help="The base model. Default: the bundled one.")


def merge_adapter(args: Namespace) -> int:
    """Writes a model directory with the adapter merged into the weights."""
    from mlx_parallm.model.merge import merge

    merge(args.model_path, args.adapter, args.output, dequantize=args.dequantize)
    print(f"wrote {args.output}; serve it with `mlx_parallm serve --model-path {shlex.quote(str(args.output))}`")
    return 0


def convert_adapter(args: Namespace) -> int:
    """Writes an adapter in another program's format."""
    from mlx_parallm.model.merge import convert

    convert(args.model_path, args.adapter, args.output, args.format)
    print(f"wrote {args.output} in the format of {args.format}")
    return 0
