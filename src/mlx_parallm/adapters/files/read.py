"""Reads an adapter's directory. Whatever it holds, the outcome is weights that fit the model, or one clear error."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_parallm.adapters.files.disk import open_weights, problem, read_config
from mlx_parallm.adapters.files.formats import Factor, Format, FormatName, format_of
from mlx_parallm.adapters.files.paths import locate
from mlx_parallm.adapters.files.tensors import Float32, Header, TensorInfo, read_header, read_tensors
from mlx_parallm.adapters.layout import AdapterLayout, LinearSpec
from mlx_parallm.adapters.names import AdapterRoots, shown
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter as read: `weights` are C-contiguous float32 NumPy arrays.

    `digest`: SHA-256 (hex) of the weights file and of what the config makes of it. `nbytes`: of the tensors as stored.
    """

    weights: AdapterWeights
    digest: str
    format: FormatName
    path: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """Two tensors that make a pair, checked by name and shape."""

    a: str
    b: str
    scale: float


def read_adapter(folder: Path, layout: AdapterLayout, max_rank: int, roots: AdapterRoots | None = None) -> AdapterFile:
    """Reads and checks the adapter in `folder`; with `roots`, no file outside of them is read. Blocks: not for
    the event loop or the device thread.

    Raises:
        AdapterFileError: the files are malformed, unsafe, of another model, or of a kind that is not supported.
    """
    form = format_of(read_config(folder, roots))
    with open_weights(folder, form.weights_file, roots) as file:
        header = read_header(file, form.weights_file)
        plans = _planned(form, header, layout, max_rank)
        data, tensors = read_tensors(file, header, form.weights_file)
    pairs = {path: _pair(plans[path], tensors, form.transposed) for path in layout.linears if path in plans}
    return AdapterFile(AdapterWeights(pairs), _digest(data, plans), form.name, folder, header.nbytes)


def _planned(form: Format, header: Header, layout: AdapterLayout, max_rank: int) -> dict[str, _Plan]:
    """By path in the model. Bounds, with the model's shapes and `max_rank`, what is read after it."""
    if not header.tensors:
        raise problem(f"{form.weights_file} holds no tensors: an empty adapter changes nothing")
    plans: dict[str, _Plan] = {}
    for path, names in _by_module(form, header).items():
        spec = locate(path, layout)
        if spec.path in plans:
            raise problem(f"{spec.path} has two adapters in {form.weights_file}: keep one")
        plans[spec.path] = _checked(form, path, names, spec, header, max_rank)
    return plans


def _by_module(form: Format, header: Header) -> dict[str, dict[Factor, str]]:
    modules: dict[str, dict[Factor, str]] = {}
    for name in header.tensors:
        path, factor = form.factor(name)
        first = modules.setdefault(path, {}).setdefault(factor, name)
        if first != name:
            raise problem(f"{shown(first)} and {shown(name)} are the same factor: keep one")
    return modules


def _checked(
    form: Format, path: str, names: Mapping[Factor, str], spec: LinearSpec, header: Header, max_rank: int
) -> _Plan:
    if len(names) < 2:
        (present,) = names.values()
        raise problem(f"{shown(present)} has no lora_{'b' if 'a' in names else 'a'} beside it: both factors are needed")
    a, b = (_matrix(names[factor], header, form.transposed) for factor in ("a", "b"))
    declared, scale = form.declared(path)
    if a[0] != spec.in_features or b[1] != spec.out_features or a[1] != b[0]:
        raise problem(
            f"{spec.path} maps {spec.in_features} to {spec.out_features} features, but {shown(names['a'])} is "
            f"{list(a)} and {shown(names['b'])} {list(b)} (as [in, rank] and [rank, out]): is it of another base model?"
        )
    if a[1] > max_rank:
        raise problem(f"rank {a[1]} is over --max-lora-rank {max_rank}: {spec.path}; raise it or train a smaller rank")
    if a[1] != declared:
        raise problem(f"{shown(names['a'])} has rank {a[1]}, but the config says {declared}: correct the config")
    if not math.isfinite(scale):
        raise problem(f"the scale of {spec.path} is not finite: correct the config")
    return _Plan(names["a"], names["b"], scale)


def _matrix(name: str, header: Header, transposed: bool) -> tuple[int, int]:
    """Its shape as ours has it."""
    info: TensorInfo = header.tensors[name]
    if len(info.shape) != 2 or min(info.shape) < 1:
        raise problem(f"{shown(name)} has shape {list(info.shape)}: a LoRA factor of a linear is a matrix")
    rows, columns = info.shape
    return (columns, rows) if transposed else (rows, columns)


def _pair(plan: _Plan, tensors: Mapping[str, Float32], transposed: bool) -> LoRAPair:
    a, b = (tensors[name].T if transposed else tensors[name] for name in (plan.a, plan.b))
    return LoRAPair(np.ascontiguousarray(a), np.ascontiguousarray(b), plan.scale)


def _digest(data: bytes, plans: Mapping[str, _Plan]) -> str:
    """Equal for equal weights: the config's other keys do not count."""
    digest = hashlib.sha256(data)
    digest.update(json.dumps({path: plan.scale for path, plan in sorted(plans.items())}).encode())
    return digest.hexdigest()
