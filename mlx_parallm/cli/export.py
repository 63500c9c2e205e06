"""`mlx_parallm adapters export`: an adapter for other programs. It needs no server."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.cli.flags import MODEL
from mlx_parallm.cli.parser import argument, takes
from mlx_parallm.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from mlx_parallm.adapters.formats import FormatName

FORMATS: Mapping[str, FormatName] = {"peft": "peft", "mlx": "mlx-lm"}
"""The formats that are read too, as commands call them."""
_NEXT = {
    "peft": "load it with PeftModel.from_pretrained(model, {folder!r})",
    "mlx": "use it with `mlx_lm.generate --model MODEL --adapter-path {quoted}`",
    "fused": "serve it with `mlx_parallm serve --model-path {quoted}`",
    "gguf": "use it with `llama-server --model MODEL.gguf --lora {quoted}/adapter.gguf`",
}
"""What to do with what was written, by format."""


@takes(
    argument(
        "adapter",
        metavar="NAME",
        help="The adapter's folder, in PEFT's or mlx-lm's format; or a run, by its folder or its name below "
        "checkpoints or runs, an adapter in it, and there `latest` or a tag.",
    ),
    argument(
        "--to",
        choices=tuple(_NEXT),
        required=True,
        help="Required. peft: for PEFT, Transformers and vLLM. mlx: for mlx-lm. fused: a model with the adapter in its "
        "weights, for mlx-lm and LM Studio. gguf: for llama.cpp and Ollama.",
    ),
    argument(
        "--out", type=Path, required=True, metavar="DIR", help="Required. The folder to write. It must not exist."
    ),
    MODEL,
    argument(
        "--base-name",
        metavar="HUB_ID",
        help="What PEFT's config calls the base model. Default: --model-path, or the bundled model's hub id.",
    ),
    argument(
        "--dequantize", action="store_true", help="With --to fused: write a dense model instead of a quantized one."
    ),
)
def export(args: Namespace) -> int:
    """Writes an adapter for another program.

    Raises:
        ConfigError: an argument cannot be used.
        StorageError: the disk failed.
        ParaLLMError: see `model.merge`.
    """
    if args.dequantize and args.to != "fused":
        raise ConfigError(f"--dequantize: --to {args.to} writes no model; leave it out")
    try:
        _write(args)
    except OSError as error:
        raise StorageError(f"{args.out} was not written: {error.strerror or error}") from error
    folder = str(args.out)
    print(f"wrote {folder}; {_NEXT[args.to].format(folder=folder, quoted=shlex.quote(folder))}")
    return 0


def _write(args: Namespace) -> None:
    from mlx_parallm.adapters.runs import named_adapter
    from mlx_parallm.model.merge import export_adapter, merge

    adapter = named_adapter(args.adapter)
    if args.to == "fused":
        merge(args.model_path, adapter, args.out, dequantize=args.dequantize)
    else:
        export_adapter(args.model_path, adapter, args.out, FORMATS.get(args.to, "gguf"), args.base_name)
