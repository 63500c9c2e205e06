"""Loads a model with mlx-lm (from a directory, from the hub, or the bundled one), fingerprints its files, and reads the
sampling options that its authors recommend.

Errors of mlx-lm and the hub are raised as `ModelNotFoundError` or `UnsupportedModelError`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import disable_progress_bars
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, load_model, load_tokenizer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedConfig

from mlx_parallm.atomic import new_folder
from mlx_parallm.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from mlx_parallm.model.bundled import BUNDLED_NAME, bundled_path, bundled_tokenizer, load_bundled
from mlx_parallm.model.packing import to_float32

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as mlx-lm loads it, with lazy weights.

    name: the directory's name, the hub id, or the bundled model's name
    config: its config.json
    source: its directory, or the GGUF file of the bundled model
    """

    name: str
    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    source: Path

    @property
    def fingerprint(self) -> str:
        """Identifies the base model for which adapters are saved. See `fingerprint_files`."""
        return fingerprint_of(self.source)


def load(
    path_or_id: str | None, *, dequantize: bool, trust_remote_code: bool = False, progress: bool = True
) -> LoadedModel:
    """Loads a directory, a hub id, or the bundled model (None).

    Call it on the device thread, which then owns the arrays.

    Args:
        dequantize: make all floating-point weights float32.
        trust_remote_code: whether Python code that comes with the model may run.
        progress: whether to report a download on stderr.

    Raises:
        ModelNotFoundError: there is no such directory or hub model, or the directory has no weights.
        UnsupportedModelError: mlx-lm does not have the architecture, the files do not fit it, or it needs remote code.
    """
    if path_or_id is None:
        model, tokenizer, config = load_bundled(dequantize)
        wrapped = TokenizerWrapper(tokenizer, eos_token_ids=[config["eos_token_id"]])
        return LoadedModel(BUNDLED_NAME, model, wrapped, config, bundled_path())
    source = find_model(path_or_id, progress)
    model, config = model_in(source, trust_remote_code)
    wrapped = tokenizer_in(source, trust_remote_code, config.get("eos_token_id"))
    if dequantize:
        to_float32(model)
    return LoadedModel(name_of(path_or_id), model, wrapped, config, source)


def name_of(path_or_id: str | None) -> str:
    """The name of a model: the directory's, the hub id, or the bundled model's."""
    if path_or_id is None:
        return BUNDLED_NAME
    folder = Path(path_or_id).expanduser()
    return folder.resolve().name if folder.exists() else path_or_id


def source_of(path_or_id: str | None, progress: bool = True) -> Path:
    """A model's directory, or the GGUF file of the bundled model (None). A hub id is downloaded unless it is in the
    cache.

    Raises:
        ModelNotFoundError: there is no such directory or hub model.
    """
    return bundled_path() if path_or_id is None else find_model(path_or_id, progress)


def fingerprint_of(source: Path) -> str:
    """Identifies a base model by its directory or file. See `fingerprint_files`."""
    return fingerprint_files(model_files(source) if source.is_dir() else [source])


def find_model(path_or_id: str, progress: bool = True) -> Path:
    """The directory of a model. A hub id is downloaded unless it is in the cache."""
    folder = Path(path_or_id).expanduser()
    may_be_hub_id = not path_or_id.startswith((".", "/", "~")) and path_or_id.count("/") <= 1
    if may_be_hub_id and not folder.exists():
        folder = _download(path_or_id, progress)
    if not folder.is_dir():
        raise ModelNotFoundError(f"no model directory at {path_or_id}")
    if not (folder / "config.json").exists():
        raise ModelNotFoundError(f"{folder} has no config.json: is it an mlx-lm or Hugging Face model directory?")
    return folder


def _download(hub_id: str, progress: bool) -> Path:
    if not (progress and sys.stderr.isatty()):
        disable_progress_bars()
    if progress:
        print(f"downloading {hub_id} (only files that are not in the cache)", file=sys.stderr, flush=True)
    try:
        return Path(snapshot_download(hub_id, allow_patterns=DEFAULT_ALLOW_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(
            f"no directory and no hub model {hub_id!r}: {error}; give a directory, or check the id and the network"
        ) from error


def model_in(folder: Path, trust_remote_code: bool) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a directory with lazy weights, and its config.json. Raises as `load` does."""
    try:
        return load_model(folder, lazy=True, trust_remote_code=trust_remote_code)  # type: ignore[no-any-return]
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{folder}: {error}") from error
    except (Exception, SystemExit) as error:  # foreign code: a file that lacks a package may end the program
        raise UnsupportedModelError(f"mlx-lm cannot load {folder}: {error}") from error


def keep_few_layers(model: nn.Module) -> tuple[int, int]:
    """Takes all but the first layers out of a model, so that the weights of others are never read: it keeps as many as
    there are kinds of layers in them, and one more. A model file that does not run with so few keeps all.

    Returns:
        How many there are now, and how many there were.
    """
    kinds = [_shape_of(layer) for layer in model.layers]
    layers, first = len(kinds), model.layers[0]
    few = min(max(map(kinds.index, kinds)) + 2, layers)
    parts = [part for module in model.modules() for part in module.values() if isinstance(part, list)]
    lists = [part for part in parts if part and part[0] is first]
    removed = [part[few:] for part in lists]
    for part in lists:
        del part[few:]
    with suppress(Exception):
        model(mx.array([[0]]), cache=make_prompt_cache(model))
        if len(model.layers) == few:
            return few, layers
    for part, rest in zip(lists, removed, strict=True):
        part += rest
    return layers, layers


def _shape_of(layer: nn.Module) -> tuple[str, ...]:
    """What differs between kinds of layers: the types of their parts, and the shapes of their weights."""
    parts = [f"{path}: {type(part).__qualname__}" for path, part in layer.named_modules()]
    return (*parts, *(f"{path}: {array.shape}" for path, array in tree_flatten(layer.parameters())))


def tokenizer_in(
    folder: Path, trust_remote_code: bool, eos_token_ids: int | list[int] | None = None
) -> TokenizerWrapper:
    """The tokenizer of a model directory.

    Transformers reads config.json first, and its class for the architecture may refuse values that mlx-lm's accepts.
    The tokenizer's own files say all that is needed, so it is then loaded without that class.

    Raises:
        UnsupportedModelError: the tokenizer cannot be loaded.
    """
    load = partial(load_tokenizer, folder, eos_token_ids=eos_token_ids)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        with suppress(Exception):
            return load(options)
        return load({**options, "config": PreTrainedConfig.from_pretrained(folder)})
    except (Exception, SystemExit) as error:
        raise UnsupportedModelError(f"the tokenizer of {folder} cannot be loaded: {error}") from error


# -- progress ------------------------------------------------------------------------------------


def materialize(model: nn.Module, name: str, show: bool) -> None:
    """Evaluates the weights; see `materializing`."""
    for _ in materializing(model, name, show):
        pass


def materializing(model: nn.Module, name: str, show: bool) -> Iterator[None]:
    """Evaluates the weights one tensor at a time, so that the arrays from which a tensor is made are freed at once.
    Yields after each.

    With `show`, reports on stderr: a bar on a terminal, otherwise a line at the end.
    """
    started, tensors = time.monotonic(), [array for _, array in tree_flatten(model.parameters())]
    total = sum(array.nbytes for array in tensors)
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    on_terminal = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=not (show and on_terminal)) as progress:
        task = progress.add_task(name, total=total)
        for array in tensors:
            mx.eval(array)
            progress.advance(task, array.nbytes)
            yield
    if show and not on_terminal:
        size = f"{len(tensors)} tensors, {total / 1e6:.0f} MB, {time.monotonic() - started:.1f} s"
        print(f"loaded {name}: {size}", file=sys.stderr, flush=True)


# -- fingerprints --------------------------------------------------------------------------------

_MIB = 1 << 20
_SAMPLED_FROM = 8 * _MIB
"""Larger files are sampled for the fingerprint, not read whole."""
_BLOCK = 64 << 10
_BLOCKS = 62


def fingerprint_files(files: Iterable[Path]) -> str:
    """32 hex digits that identify a base model by the names, sizes and content of its files, given in any order.

    Of a file over 8 MiB only the first MiB, the last MiB and 62 blocks of 64 KiB spread evenly between them are read.
    """
    total = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0{_content_digest(path, size)}\n".encode())
    return total.hexdigest()[:32]


def model_files(folder: Path) -> list[Path]:
    """The files of a model directory that identify it: config.json, and the weights that mlx-lm would load or a GGUF.

    Raises:
        ModelNotFoundError: the directory has no weights.
    """
    weights = sorted([*folder.glob("model*.safetensors"), *folder.glob("*.gguf")])
    if not weights:
        raise ModelNotFoundError(f"{folder} has no model*.safetensors and no .gguf file")
    return [*weights, *folder.glob("config.json")]


def _content_digest(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start, length in _spans(size):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()


def _spans(size: int) -> Iterator[tuple[int, int]]:
    """(start, length) in bytes of the parts of a file that are read."""
    if size <= _SAMPLED_FROM:
        yield 0, size
        return
    yield 0, _MIB
    room = size - 2 * _MIB - _BLOCK
    for index in range(_BLOCKS):
        yield _MIB + room * index // (_BLOCKS - 1), _BLOCK
    yield size - _MIB, _MIB


# -- recommended sampling options ----------------------------------------------------------------

GENERATION_CONFIG = "generation_config.json"
"""Transformers' file with the sampling options that a model's authors recommend."""
BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (math.ulp(0), 10),
    "max_new_tokens": (1, 2**31 - 1),
}
"""The options that are read, with their smallest and largest values."""
WHOLE = frozenset({"top_k", "max_new_tokens"})


def generation_defaults(source: Path) -> dict[str, float]:
    """The options in the file of a model's folder; none if there is no file, as for a model that is one file itself.
    Those that cannot be used are logged and left out."""
    try:
        options = json.loads((source / GENERATION_CONFIG).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is not used: %s", GENERATION_CONFIG, error)
        return {}
    found: dict[str, float] = {}
    for name, (low, high) in BOUNDS.items():
        value: Any = options.get(name) if isinstance(options, dict) else None
        if type(value) in ((int,) if name in WHOLE else (int, float)) and low <= value <= high:
            found[name] = value
        elif value is not None:
            text = "%s: %s is not used: %r is not a number from %g to %g"
            log.warning(text, GENERATION_CONFIG, name, value, low, high)
    return found


# -- a folder with the tokenizer alone -----------------------------------------------------------

_FAST_CLASS = "PreTrainedTokenizerFast"
"""The name of the class of fast tokenizers that Transformers 4 and 5 both know. Version 5 writes another one."""


def save_tokenizer(model_path: str | None, output: Path, *, trust_remote_code: bool = False) -> None:
    """Writes the tokenizer and the chat template of a model into a new folder, which Transformers' AutoTokenizer reads
    without a network. The write is atomic.

    Args:
        model_path: a model directory or a hub id; None means the bundled model.
        trust_remote_code: whether Python code that comes with the model may run.

    Raises:
        ConfigError: `output` exists.
        ModelNotFoundError: there is no such model.
        UnsupportedModelError: its tokenizer cannot be loaded.
    """
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists: name a directory that does not")
    tokenizer: Any = (
        bundled_tokenizer() if model_path is None else tokenizer_in(find_model(model_path), trust_remote_code)
    )
    with new_folder(output) as folder:
        tokenizer.save_pretrained(folder)
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("tokenizer_class") == "TokenizersBackend":
            config["tokenizer_class"] = _FAST_CLASS
            path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
