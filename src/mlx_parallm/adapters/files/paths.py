"""From a module path in a file to the model's linear, whichever way the file spells it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mlx_parallm.adapters.files.disk import problem
from mlx_parallm.adapters.layout import AdapterLayout, LinearSpec
from mlx_parallm.adapters.names import shown

_TEXT = "language_model"
_EXPERTS = re.compile(r"(^|\.)(experts|switch_mlp)(\.|$)")
_KINDS = {"embed_tokens": "embedding LoRA", "lm_head": "head LoRA"}


def locate(path: str, layout: AdapterLayout) -> LinearSpec:
    """The linear that `path` names.

    Raises:
        AdapterFileError: adapters may not change what it names, or the model has no such linear.
    """
    for spelling in _spellings(path):
        if spelling in layout.linears:
            return layout.linears[spelling]
    kind = _refusal(path, layout)
    if kind:
        raise problem(f"{kind} is not supported: {shown(path)[1:-1]}; train the adapter without it")
    raise problem(f"the model has no such linear: {shown(path)[1:-1]}; is the adapter of another base model?")


def hugging_face_path(path: str) -> str:
    """As Transformers spells a path of ours: the text part of a multimodal model is inside `model`."""
    inner = path.removeprefix(f"{_TEXT}.model.")
    return path if inner == path else f"model.{_TEXT}.{inner}"


def _spellings(path: str) -> Iterator[str]:
    """mlx-lm: language_model.model.layers…; Transformers: that, model.language_model.layers… or model.layers…"""
    yield path
    *head, tail = path.split(".", 2)
    bare = ".".join([*(part for part in head if part != _TEXT), tail])
    yield bare
    yield f"{_TEXT}.{bare}"
    yield hugging_face_path(f"{_TEXT}.{bare}")


def _refusal(path: str, layout: AdapterLayout) -> str:
    for spelling in _spellings(path):
        if spelling in layout.refused:
            return layout.refused[spelling]
    if _EXPERTS.search(path):
        return "expert LoRA"
    return _KINDS.get(path.rpartition(".")[2], "")
