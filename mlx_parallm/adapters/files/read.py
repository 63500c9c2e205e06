"""Reads an adapter's directory, in one of the `formats`, and checks that the adapter fits the model.

    the config and the weights file's header   give a plan for each pair: names, shapes and rank are checked
    the tensors                                are read then, and become the pairs

PEFT saves copies of the base model's embedding and head beside the factors with `save_embedding_layers`. One that
equals the base model's weight changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlx_parallm.adapters.files.disk import (
    AdapterRoots,
    Float32,
    TensorInfo,
    WeightsFile,
    problem,
    read_config,
    stored_tensor,
)
from mlx_parallm.adapters.files.formats import FROZEN, Factor, Format, FormatName, format_of, locate
from mlx_parallm.adapters.weights import (
    AdapterLayout,
    AdapterWeights,
    LinearSpec,
    LoRAPair,
    VersionInfo,
    plain_path,
)
from mlx_parallm.errors import shown

_ROUNDING = 2.0**-8
"""The largest relative difference of a number that was rounded to bfloat16."""
_ROWS = 4096
_ADVICE = "save the adapter without it (save_embedding_layers=False)"


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter that was read from files and fits the model.

    `weights`: C-contiguous float32 NumPy arrays. `info`: its digest is the SHA-256 (hex) of the weights file and the
    scales; the other keys of the config do not change it. Its warning says how the config contradicts the tensors.
    """

    weights: AdapterWeights
    info: VersionInfo
    format: FormatName


@dataclass(frozen=True, slots=True)
class PairPlan:
    """The tensor names of one LoRA pair, and its scale. Names, shapes and rank have been checked. `outputs`: which of
    the outputs in the file are those of the model's linear; None if all are."""

    a: str
    b: str
    scale: float
    outputs: slice | None


def read_adapter(folder: Path, layout: AdapterLayout, max_rank: int, roots: AdapterRoots | None = None) -> AdapterFile:
    """Reads and checks the adapter in `folder`. If `roots` is given, reads no file outside of them. Blocks on the disk,
    so call it neither on the event loop nor on the device thread.

    Raises:
        AdapterFileError: the files are malformed, unsafe, of another model, or of a kind that is not supported.
    """
    return read_as(format_of(read_config(folder, roots)), folder, layout, max_rank, roots)[0]


def read_as(
    form: Format,
    folder: Path,
    layout: AdapterLayout,
    max_rank: int,
    roots: AdapterRoots | None = None,
    others: Collection[str] = (),
) -> tuple[AdapterFile, dict[str, Float32]]:
    """As `read_adapter`, with a config that has been read. Returns also those of the tensors `others` that the file
    has, which are no factors."""
    with WeightsFile(folder, form.weights_file, roots) as file:
        copies = {name: path for name in file.tensors if (path := form.base_copy(name)) is not None}
        plans = _plans(form, file.tensors, {*copies, *others}, layout, max_rank)
        for name, path in copies.items():
            if FROZEN in name:
                _check_shape(name, file.tensors[name], locate(path, layout)[0])
        compared = {name: path for name, path in copies.items() if FROZEN not in name}
        factors = {name for plan in plans.values() for name in (plan.a, plan.b)}
        tensors = file.read([*factors, *compared, *others])
    for name, path in compared.items():
        _check_copy(name, path, file.tensors[name].dtype, tensors[name], layout)
    pairs = {
        spec.path: _pair(plans[spec.path], tensors, spec, form.transposed, max_rank)
        for spec in layout
        if spec.path in plans
    }
    weights = AdapterWeights(pairs, form.rslora)
    nbytes = sum(file.tensors[name].nbytes for plan in plans.values() for name in (plan.a, plan.b))
    digest, warning = _digest(file.data, plans), form.contradiction(plans, layout)
    info = replace(VersionInfo.of(weights), nbytes=nbytes, digest=digest, root=str(folder), warning=warning)
    return AdapterFile(weights, info, form.name), {name: tensors[name] for name in others if name in tensors}


# -- plans -----------------------------------------------------------------------------------------


def _plans(
    form: Format, tensors: Mapping[str, TensorInfo], ignored: Collection[str], layout: AdapterLayout, max_rank: int
) -> dict[str, PairPlan]:
    """The plan of each pair, by path in the model. Its checks limit how many bytes are read afterwards."""
    modules: dict[str, dict[Factor, str]] = {}
    for name in tensors:
        if name not in ignored:
            path, factor = form.factor(name)
            first = modules.setdefault(path, {}).setdefault(factor, name)
            if first != name:
                raise problem(f"{shown(first)} and {shown(name)} are the same factor: keep one")
    if not modules:
        raise problem(f"{form.weights_file} holds no tensors of an adapter: an empty adapter changes nothing")
    plans: dict[str, PairPlan] = {}
    for path, names in modules.items():
        specs, start = locate(path, layout), 0
        scale = _checked_scale(form, path, names, specs, tensors, max_rank)
        for spec in specs:
            if spec.path in plans:
                raise problem(f"{spec.path} has two adapters in {form.weights_file}: keep one")
            outputs = slice(start, start := start + spec.out_features) if len(specs) > 1 else None
            plans[spec.path] = PairPlan(names["a"], names["b"], scale, outputs)
    return plans


def _checked_scale(
    form: Format,
    path: str,
    names: Mapping[Factor, str],
    specs: Sequence[LinearSpec],
    tensors: Mapping[str, TensorInfo],
    max_rank: int,
) -> float:
    """The scale of a pair whose shapes and rank are right. `specs`: the linears that the file's linear at `path` is."""
    spec, outputs = specs[0], sum(spec.out_features for spec in specs)
    if spec.experts and form.name == "peft":
        raise problem(f"expert LoRA in another format than mlx-lm's is not supported: {shown(path)[1:-1]}")
    if len(names) < 2:
        (present,) = names.values()
        raise problem(f"{shown(present)} has no lora_{'b' if 'a' in names else 'a'} beside it: both factors are needed")
    a, b = (_matrix(names[factor], tensors[names[factor]].shape, spec, form.transposed) for factor in ("a", "b"))
    declared, scale = form.declared(path)
    if a[0] != spec.in_features or b[1] != outputs or a[1] != b[0]:
        raise problem(
            f"{spec.path} maps {spec.in_features} to {outputs} features, but {shown(names['a'])} is "
            f"{list(a)} and {shown(names['b'])} {list(b)} (as [in, rank] and [rank, out]): is it of another base model?"
        )
    _check_rank(a[1], max_rank * len(specs), spec.path)
    if a[1] != declared:
        raise problem(f"{shown(names['a'])} has rank {a[1]}, but the config says {declared}: correct the config")
    if not math.isfinite(scale):
        raise problem(f"the scale of {spec.path} is not finite: correct the config")
    return scale


def _matrix(name: str, shape: tuple[int, ...], spec: LinearSpec, transposed: bool) -> tuple[int, int]:
    """A shape as [in, rank] or [rank, out], without the axis of experts."""
    if spec.experts and (len(shape) != 3 or shape[0] != spec.experts):
        raise problem(
            f"{shown(name)} has shape {list(shape)}, but {spec.path} of this model has {spec.experts} experts: "
            "a LoRA factor of experts has a matrix for each of them"
        )
    if len(shape) != 2 + len(spec.expert_axis) or min(shape) < 1:
        raise problem(f"{shown(name)} has shape {list(shape)}: a LoRA factor of a linear is a matrix")
    rows, columns = shape[-2:]
    return (columns, rows) if transposed or spec.experts else (rows, columns)


def _check_rank(rank: int, max_rank: int, path: str) -> None:
    if rank > max_rank:
        raise problem(f"rank {rank} is over --max-lora-rank {max_rank}: {path}; raise it or train a smaller rank")


# -- pairs -----------------------------------------------------------------------------------------


def _pair(
    plan: PairPlan, tensors: Mapping[str, Float32], spec: LinearSpec, transposed: bool, max_rank: int
) -> LoRAPair:
    """The pair of a linear. Of a linear that is a part of the file's, it has the ranks that its outputs use."""
    a, b = tensors[plan.a], tensors[plan.b]
    if transposed or spec.experts:
        a, b = a.swapaxes(-1, -2), b.swapaxes(-1, -2)
    if plan.outputs is not None:
        part = b[:, plan.outputs]
        used = np.flatnonzero(np.abs(part).max(axis=1))
        used = used if used.size else np.zeros(1, np.intp)
        a, b = a[:, used], part[used]
    _check_rank(a.shape[-1], max_rank, spec.path)
    return LoRAPair(np.ascontiguousarray(a), np.ascontiguousarray(b), plan.scale)


def _digest(data: bytes, plans: Mapping[str, PairPlan]) -> str:
    digest = hashlib.sha256(data)
    digest.update(json.dumps({path: plan.scale for path, plan in sorted(plans.items())}).encode())
    return digest.hexdigest()


# -- copies of the base model's weights ------------------------------------------------------------


def _check_shape(name: str, info: TensorInfo, spec: LinearSpec) -> None:
    """A copy of the base model's weight beside the factors is not used. Its shape shows whether it is of this model."""
    if info.shape != (spec.out_features, spec.in_features):
        raise problem(
            f"{shown(name)} is {list(info.shape)}, but {spec.path} of this model is "
            f"{[spec.out_features, spec.in_features]}: the adapter is of another base model, or of a resized one"
        )


def _check_copy(name: str, path: str, dtype: str, values: Float32, layout: AdapterLayout) -> None:
    """Checks that the tensor `name`, a copy of the weight of the module at `path`, is that of the base model. It may be
    of another type, and rounded.

    Raises:
        AdapterFileError: it differs, or the base model's files do not have the weight as it was trained.
    """
    what = f"{shown(name)} is a copy of the {'head' if path.endswith('lm_head') else 'embedding'}"
    base = _base_weight(path, layout.source)
    if base is None:
        raise problem(f"{what}, which cannot be compared with this base model's: that is quantized; {_ADVICE}")
    rounding = 0.0 if base[0] == dtype else _ROUNDING
    rows = [slice(at, at + _ROWS) for at in range(0, len(base[1]), _ROWS)]
    if base[1].shape != values.shape or not all(
        np.allclose(values[part], base[1][part], rtol=rounding, atol=1e-6 * bool(rounding)) for part in rows
    ):
        raise problem(f"{what} that differs from this base model's, so it was trained or resized; {_ADVICE}")


def _base_weight(path: str, folder: Path | None) -> tuple[str, Float32] | None:
    """Type and values of a module's weight in the files of the base model. A tied model's head is its embedding."""
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    for name in (path, path.replace("lm_head", "model.embed_tokens")):
        for file in files:
            with suppress(OSError, ValueError, struct.error):  # it is gone, or no safetensors file
                if (found := stored_tensor(file, plain_path(f"{name}.weight"))) is not None:
                    return found
    return None
