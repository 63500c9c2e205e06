"""From a directory or a hub id to an mlx-lm model in memory, and the project's own errors when that fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import disable_progress_bars
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, dequantize_model, load_model, load_tokenizer

from mlx_parallm.errors import ModelNotFoundError, UnsupportedModelError


def find_model(path_or_id: str, progress: bool) -> Path:
    """The directory of a model, downloaded where `path_or_id` is a hub id.

    Raises:
        ModelNotFoundError: no such directory, or the hub does not give that id.
    """
    folder = Path(path_or_id).expanduser()
    if not folder.exists() and _may_be_hub_id(path_or_id):
        folder = _download(path_or_id, progress)
    if not folder.is_dir():
        raise ModelNotFoundError(f"no model directory at {path_or_id}")
    if not (folder / "config.json").exists():
        raise ModelNotFoundError(f"{folder} holds no config.json: is it an mlx-lm or Hugging Face model directory?")
    return folder


def _may_be_hub_id(text: str) -> bool:
    return not text.startswith((".", "/", "~")) and text.count("/") <= 1


def _download(hub_id: str, progress: bool) -> Path:
    if not (progress and sys.stderr.isatty()):
        disable_progress_bars()
    if progress:
        print(f"downloading {hub_id} (what the cache lacks)", file=sys.stderr, flush=True)
    try:
        return Path(snapshot_download(hub_id, allow_patterns=DEFAULT_ALLOW_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(
            f"no directory and no hub model {hub_id!r}: {error}; give a directory, or check the id and the network"
        ) from error


def load_directory(
    folder: Path, dequantize: bool, trust_remote_code: bool
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """Model (weights lazy), tokenizer and config of a directory, as mlx-lm gives them.

    `dequantize`: all floating weights become float32. Must run on the device thread, which then owns the arrays.

    Raises:
        ModelNotFoundError: the directory has no weights.
        UnsupportedModelError: mlx-lm has no such architecture, the files do not fit it, or it wants remote code.
    """
    try:
        model, config = load_model(folder, lazy=True, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(
            folder, {"trust_remote_code": trust_remote_code}, eos_token_ids=config.get("eos_token_id")
        )
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{folder}: {error}") from error
    except (ValueError, TypeError, KeyError, OSError, RuntimeError, ImportError) as error:
        raise UnsupportedModelError(f"mlx-lm cannot load {folder}: {error}") from error
    if dequantize:
        model = to_float32(model)
    return model, tokenizer, config


def to_float32(model: nn.Module) -> nn.Module:
    """Dequantizes what is quantized and widens the rest, lazily.

    Raises:
        UnsupportedModelError: a layer's packing is one that mlx-lm does not dequantize.
    """
    packed = [name for name, _ in tree_flatten(model.parameters()) if name.endswith(".global_scale")]
    if not packed:
        model = dequantize_model(model)
        packed = [name for name, _ in tree_flatten(model.parameters()) if name.endswith(".scales")]
    if packed:
        raise UnsupportedModelError(
            f"cannot dequantize {packed[0]}, as a CPU needs: use an unquantized or an affine-quantized copy"
        )
    model.update(tree_map(_widened, model.parameters()))
    return model


def _widened(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
