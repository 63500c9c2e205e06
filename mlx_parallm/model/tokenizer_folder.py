"""`mlx_parallm tokenizer save`: writes a model's tokenizer into a folder of its own, for clients that render chats and
tokenise by themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mlx_parallm.atomic import new_folder
from mlx_parallm.errors import ConfigError
from mlx_parallm.model.bundled import bundled_tokenizer
from mlx_parallm.model.loading import find_model, tokenizer_in

_CONFIG = "tokenizer_config.json"
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
    tokenizer = _tokenizer(model_path, trust_remote_code)
    with new_folder(output) as folder:
        tokenizer.save_pretrained(folder)
        _name_fast_class(folder / _CONFIG)


def _tokenizer(model_path: str | None, trust_remote_code: bool) -> Any:
    if model_path is None:
        return bundled_tokenizer()
    return tokenizer_in(find_model(model_path), trust_remote_code)


def _name_fast_class(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = _FAST_CLASS
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
