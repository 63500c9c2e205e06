"""How adapter files spell the paths of a model's linears."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlx_parallm.adapters.files.disk import problem
from mlx_parallm.adapters.weights import AdapterLayout, LinearSpec
from mlx_parallm.errors import shown

_TEXT, _HEAD = "language_model", "lm_head"
_EXPERTS = re.compile(r"(^|\.)(experts|switch_mlp)(\.|$)")
_REFUSED_KINDS = {"embed_tokens": "embedding LoRA"}


def locate(path: str, layout: AdapterLayout) -> Sequence[LinearSpec]:
    """The model's linears that a path in a file names, in any of the spellings in use; see `AdapterLayout.spelled`.

    Raises:
        AdapterFileError: the model has no such linear, or adapters may not change that module.
    """
    if specs := layout.spelled(path):
        return specs
    if kind := _refusal(path, layout):
        raise problem(f"{kind} is not supported: {shown(path)[1:-1]}; train the adapter without it")
    raise problem(f"the model has no such linear: {shown(path)[1:-1]}; is the adapter of another base model?")


def transformers_path(path: str, layout: AdapterLayout) -> str:
    """Transformers' spelling of a path in the model: the text part of a multimodal model is inside `model`, and its
    head beside that."""
    path = layout.transformers.get(path, path)
    if path == f"{_TEXT}.{_HEAD}":
        return _HEAD
    inner = path.removeprefix(f"{_TEXT}.model.")
    return path if inner == path else f"model.{_TEXT}.{inner}"


def _refusal(path: str, layout: AdapterLayout) -> str:
    if refusal := layout.refusal(path):
        return refusal
    if _EXPERTS.search(path):
        return "expert LoRA in another format than mlx-lm's" if any(spec.experts for spec in layout) else "expert LoRA"
    return _REFUSED_KINDS.get(path.rpartition(".")[2], "")


def block_of(path: str) -> tuple[int | None, str]:
    """The index of a path's transformer block, and the path inside the block, which mlx-lm lists in `keys`."""
    parts = path.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return (None, path) if index is None else (int(parts[index]), ".".join(parts[index + 1 :]))
