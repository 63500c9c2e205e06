"""`mlx_parallm adapters export`: an adapter for other programs. It needs no server."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mlx_parallm.cli.flags import MODEL
from mlx_parallm.cli.parser import argument, takes
from mlx_parallm.errors import ConfigError, StorageError
from mlx_parallm.extras_table import needed

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
        "checkpoints or runs, an adapter in it, and there `latest` or a tag. A run knows its base model.",
    ),
    argument(
        "--to",
        choices=tuple(_NEXT),
        required=True,
        help="Required. peft: for PEFT, Transformers and vLLM. mlx: for mlx-lm. fused: a model with the adapter in its "
        "weights, for mlx-lm and LM Studio. gguf: for llama.cpp and Ollama.",
    ),
    argument(
        "--out", type=Path, metavar="DIR", help="The folder to write. It must not exist. Required without --push."
    ),
    argument(
        "--push",
        metavar="ORG/NAME",
        help="Write it into this repository of the Hugging Face hub, too or instead. A new one is private.",
    ),
    argument("--public", action="store_true", help="With --push: a new repository is public."),
    MODEL,
    argument(
        "--base-name",
        metavar="HUB_ID",
        help="The base model's id on the hub, for PEFT and for the model card. Default: --model-path, or that of the "
        "bundled model.",
    ),
    argument(
        "--dequantize", action="store_true", help="With --to fused: write a dense model instead of a quantized one."
    ),
)
def export(args: Namespace) -> int:
    """Writes an adapter for another program, into a folder, the hub or both.

    Raises:
        ConfigError: an argument cannot be used.
        StorageError: the disk failed, or the hub did.
        ParaLLMError: see `model.merge`.
    """
    from mlx_parallm.adapters.runs import named_adapter
    from mlx_parallm.model.bundled import BUNDLED_HUB_ID

    adapter = named_adapter(args.adapter)
    model_path = args.model_path or _base_of_run(adapter)
    _check(args, model_path)
    base_name = args.base_name or model_path or BUNDLED_HUB_ID
    with TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary, "export")
        try:
            _write(args, adapter, model_path, base_name, folder)
        except OSError as error:
            raise StorageError(f"{folder} was not written: {error.strerror or error}") from error
        if args.out:
            text = _NEXT[args.to].format(folder=str(folder), quoted=shlex.quote(str(folder)))
            print(f"wrote {folder}; {text}")
        if args.push:
            commit = needed("hub", "--push").push(folder, args.push, args.to, base_name, args.public)
            print(f"pushed to {commit}")
    return 0


def _base_of_run(adapter: Path) -> str | None:
    """The base model of the run that has an adapter's checkpoint; None: it is in no run, or was the bundled one."""
    from mlx_parallm.rl.runs.record import read_record

    record = read_record(adapter.absolute().parent.parent)
    return record.configuration.get("model", {}).get("base_model_path") if record else None


def _check(args: Namespace, model_path: str | None) -> None:
    if args.dequantize and args.to != "fused":
        raise ConfigError(f"--dequantize: --to {args.to} writes no model; leave it out")
    if not (args.out or args.push):
        raise ConfigError("--out: name the folder to write, or a repository with --push")
    if args.public and not args.push:
        raise ConfigError("--public: without --push nothing leaves this machine; leave it out")
    if args.push and args.base_name is None and model_path and Path(model_path).expanduser().exists():
        raise ConfigError("--push: say with --base-name what the hub calls the base model, which is a folder here")


def _write(args: Namespace, adapter: Path, model_path: str | None, base_name: str, folder: Path) -> None:
    from mlx_parallm.model.merge import export_adapter, merge

    if args.to == "fused":
        merge(model_path, adapter, folder, dequantize=args.dequantize)
    else:
        export_adapter(model_path, adapter, folder, FORMATS.get(args.to, "gguf"), base_name)
