"""Reads an adapter's directory, in mlx-lm's or PEFT's format, and checks that the adapter fits the model.

    mlx-lm   adapters.safetensors       `<path>.lora_a` [in, rank], `<path>.lora_b` [rank, out]; one rank and scale.
                                        Those of experts are [experts, rank, in] and [experts, out, rank]
    PEFT     adapter_model.safetensors  see `peft`

PEFT saves copies of the base model's embedding and head beside the factors with `save_embedding_layers`. One that
equals the base model's weight changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np

from mlx_parallm.adapters.files.disk import (
    CONFIG_FILE,
    ITEM_BYTES,
    AdapterRoots,
    Float32,
    Header,
    TensorInfo,
    described,
    flag_of,
    number_of,
    open_weights,
    problem,
    rank_of,
    read_config,
    read_header,
    read_tensors,
    widened,
)
from mlx_parallm.adapters.files.peft import FROZEN, PeftFormat
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LinearSpec, LoRAPair, plain_path
from mlx_parallm.errors import shown

_ROUNDING = 2.0**-8
"""The largest relative difference of a number that was rounded to bfloat16."""
_ROWS = 4096
_ADVICE = "save the adapter without it (save_embedding_layers=False)"


def check_copy(name: str, path: str, info: TensorInfo, values: Float32, layout: AdapterLayout) -> None:
    """Checks that the tensor `name`, a copy of the weight of the module at `path`, is that of the base model. It may be
    of another type, and rounded.

    Raises:
        AdapterFileError: it differs, or the base model's files do not have the weight as it was trained.
    """
    what = f"{shown(name)} is a copy of the {'head' if path.endswith('lm_head') else 'embedding'}"
    base = _base_weight(path, layout.source)
    if base is None:
        raise problem(f"{what}, which cannot be compared with this base model's: that is quantized; {_ADVICE}")
    dtype, weight = base
    rounding = 0.0 if dtype == info.dtype else _ROUNDING
    rows = range(0, len(weight), _ROWS)
    if weight.shape != values.shape or not all(
        np.allclose(values[at : at + _ROWS], weight[at : at + _ROWS], rtol=rounding, atol=1e-6 * bool(rounding))
        for at in rows
    ):
        raise problem(f"{what} that differs from this base model's, so it was trained or resized; {_ADVICE}")


def _base_weight(path: str, folder: Path | None) -> tuple[str, Float32] | None:
    """Type and values of a module's weight in the files of the base model. A tied model's head is its embedding."""
    if folder is None or not folder.is_dir():
        return None
    files = sorted(folder.glob("*.safetensors"))
    names = [f"{each}.weight" for each in (path, path.replace("lm_head", "model.embed_tokens"))]
    for name in names:
        for file in files:
            with suppress(OSError, ValueError, struct.error):  # it is gone, or no safetensors file
                if (found := _tensor_in(file, plain_path(name))) is not None:
                    return found
    return None


def _tensor_in(file: Path, plain: str) -> tuple[str, Float32] | None:
    """Type and values of the tensor with this plain path, if a file has it as floats."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        tensors = json.loads(opened.read(length))
        floats = (name for name, tensor in tensors.items() if tensor.get("dtype") in ITEM_BYTES)
        name = next((name for name in floats if plain_path(name) == plain), None)
        if name is None:
            return None
        info = TensorInfo(tensors[name]["dtype"], tuple(tensors[name]["shape"]))
        opened.seek(8 + length + tensors[name]["data_offsets"][0])
        return info.dtype, widened(name, info, bytearray(opened.read(info.nbytes)))


MLX_LM_WEIGHTS = "adapters.safetensors"
_MLX_LM_KINDS = {"dora": "DoRA", "full": "full fine-tuning"}

FormatName = Literal["mlx-lm", "peft"]
Factor = Literal["a", "b"]


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter that was read from files and fits the model.

    `weights`: C-contiguous float32 NumPy arrays. `digest`: SHA-256 (hex) of the weights file and the scales; the other
    keys of the config do not change it. `nbytes`: bytes of the factors as stored. `warning`: how the config contradicts
    the tensors; "" if it does not.
    """

    weights: AdapterWeights
    digest: str
    format: FormatName
    path: Path
    nbytes: int
    warning: str = ""


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
    form = format_of(read_config(folder, roots))
    with open_weights(folder, form.weights_file, roots) as file:
        header = read_header(file, form.weights_file)
        plans = planned(form, header, layout, max_rank)
        data, tensors = read_factors(form, file, header, plans, layout)
    pairs = pairs_of(plans, tensors, layout, form.transposed, max_rank)
    nbytes = sum(header.tensors[name].nbytes for plan in plans.values() for name in (plan.a, plan.b))
    warning = form.contradiction(plans, layout)
    return AdapterFile(AdapterWeights(pairs, form.rslora), _digest(data, plans), form.name, folder, nbytes, warning)


def read_factors(
    form: Format,
    file: BinaryIO,
    header: Header,
    plans: Mapping[str, PairPlan],
    layout: AdapterLayout,
    others: Sequence[str] = (),
) -> tuple[bytes, dict[str, Float32]]:
    """Reads the factors of these plans, and the tensors `others`; see `read_tensors`. Checks copies of the base model's
    weights beside them.

    Raises:
        AdapterFileError: as `read_tensors`; or a copy differs from the base model's weight.
    """
    factors = [name for plan in plans.values() for name in (plan.a, plan.b)]
    copies = {name: path for name in header.tensors if (path := form.base_copy(name)) and FROZEN not in name}
    data, tensors = read_tensors(file, header, [*factors, *copies, *others], form.weights_file)
    for name, path in copies.items():
        check_copy(name, path, header.tensors[name], tensors.pop(name), layout)
    return data, tensors


def planned(form: Format, header: Header, layout: AdapterLayout, max_rank: int) -> dict[str, PairPlan]:
    """The plan of each pair, by path in the model. Its checks limit how many bytes are read afterwards.

    Raises:
        AdapterFileError: as `read_adapter`.
    """
    modules = _by_module(form, header, layout)
    if not modules:
        raise problem(f"{form.weights_file} holds no tensors of an adapter: an empty adapter changes nothing")
    plans: dict[str, PairPlan] = {}
    for path, names in modules.items():
        specs = locate(path, layout)
        whole = replace(specs[0], out_features=sum(spec.out_features for spec in specs))
        if whole.experts and form.name == "peft":
            raise problem(f"expert LoRA in another format than mlx-lm's is not supported: {shown(path)[1:-1]}")
        scale = _checked(form, path, names, whole, header, max_rank * len(specs))
        start = 0
        for spec in specs:
            if spec.path in plans:
                raise problem(f"{spec.path} has two adapters in {form.weights_file}: keep one")
            outputs = slice(start, start := start + spec.out_features) if len(specs) > 1 else None
            plans[spec.path] = PairPlan(names["a"], names["b"], scale, outputs)
    return plans


def _by_module(form: Format, header: Header, layout: AdapterLayout) -> dict[str, dict[Factor, str]]:
    """The names of each module's factors."""
    modules: dict[str, dict[Factor, str]] = {}
    for name, info in header.tensors.items():
        if (copied := form.base_copy(name)) is not None:
            if FROZEN in name:
                _check_shape(name, info, locate(copied, layout)[0])
            continue
        path, factor = form.factor(name)
        first = modules.setdefault(path, {}).setdefault(factor, name)
        if first != name:
            raise problem(f"{shown(first)} and {shown(name)} are the same factor: keep one")
    return modules


def _check_shape(name: str, info: TensorInfo, spec: LinearSpec) -> None:
    """A copy of the base model's weight beside the factors is not used. Its shape shows whether it is of this model."""
    if info.shape != (spec.out_features, spec.in_features):
        raise problem(
            f"{shown(name)} is {list(info.shape)}, but {spec.path} of this model is "
            f"{[spec.out_features, spec.in_features]}: the adapter is of another base model, or of a resized one"
        )


def _checked(
    form: Format, path: str, names: Mapping[Factor, str], spec: LinearSpec, header: Header, max_rank: int
) -> float:
    """The scale of a pair whose shapes and rank are right. `spec`: of the linear as the file knows it."""
    if len(names) < 2:
        (present,) = names.values()
        raise problem(f"{shown(present)} has no lora_{'b' if 'a' in names else 'a'} beside it: both factors are needed")
    a, b = (_matrix(names[factor], header, spec, form.transposed) for factor in ("a", "b"))
    declared, scale = form.declared(path)
    if a[0] != spec.in_features or b[1] != spec.out_features or a[1] != b[0]:
        raise problem(
            f"{spec.path} maps {spec.in_features} to {spec.out_features} features, but {shown(names['a'])} is "
            f"{list(a)} and {shown(names['b'])} {list(b)} (as [in, rank] and [rank, out]): is it of another base model?"
        )
    _check_rank(a[1], max_rank, spec.path)
    if a[1] != declared:
        raise problem(f"{shown(names['a'])} has rank {a[1]}, but the config says {declared}: correct the config")
    if not math.isfinite(scale):
        raise problem(f"the scale of {spec.path} is not finite: correct the config")
    return scale


def _check_rank(rank: int, max_rank: int, path: str) -> None:
    if rank > max_rank:
        raise problem(f"rank {rank} is over --max-lora-rank {max_rank}: {path}; raise it or train a smaller rank")


def _matrix(name: str, header: Header, spec: LinearSpec, transposed: bool) -> tuple[int, int]:
    """The shape as [in, rank] or [rank, out], without the axis of experts."""
    info: TensorInfo = header.tensors[name]
    if spec.experts and (len(info.shape) != 3 or info.shape[0] != spec.experts):
        raise problem(
            f"{shown(name)} has shape {list(info.shape)}, but {spec.path} of this model has {spec.experts} experts: "
            "a LoRA factor of experts has a matrix for each of them"
        )
    if len(info.shape) != 2 + len(spec.expert_axis) or min(info.shape) < 1:
        raise problem(f"{shown(name)} has shape {list(info.shape)}: a LoRA factor of a linear is a matrix")
    rows, columns = info.shape[-2:]
    return (columns, rows) if transposed or spec.experts else (rows, columns)


def pairs_of(
    plans: Mapping[str, PairPlan],
    tensors: Mapping[str, Float32],
    layout: AdapterLayout,
    transposed: bool,
    max_rank: int,
) -> dict[str, LoRAPair]:
    """The pairs of the tensors that were read, by path, in the layout's order.

    Raises:
        AdapterFileError: the rank of a part of a pair is over `max_rank`.
    """
    pairs = {
        spec.path: _pair(plans[spec.path], tensors, transposed or spec.experts > 0)
        for spec in layout
        if spec.path in plans
    }
    for path, pair in pairs.items():
        _check_rank(pair.rank, max_rank, path)
    return pairs


def _pair(plan: PairPlan, tensors: Mapping[str, Float32], transposed: bool) -> LoRAPair:
    a, b = (tensors[name].swapaxes(-1, -2) if transposed else tensors[name] for name in (plan.a, plan.b))
    if plan.outputs is not None:
        part = b[:, plan.outputs]
        used = np.flatnonzero(np.abs(part).max(axis=1))
        used = used if used.size else np.zeros(1, np.intp)
        a, b = a[:, used], part[used]
    return LoRAPair(np.ascontiguousarray(a), np.ascontiguousarray(b), plan.scale)


def _digest(data: bytes, plans: Mapping[str, PairPlan]) -> str:
    digest = hashlib.sha256(data)
    digest.update(json.dumps({path: plan.scale for path, plan in sorted(plans.items())}).encode())
    return digest.hexdigest()


# -- formats ---------------------------------------------------------------------------------------


class Format(Protocol):
    """An adapter's config, in one of the formats. `transposed`: a is stored as [rank, in] and b as [out, rank]."""

    @property
    def name(self) -> FormatName: ...

    @property
    def weights_file(self) -> str: ...

    @property
    def transposed(self) -> bool: ...

    @property
    def rslora(self) -> bool:
        """Whether the adapter is rank-stabilised."""

    def base_copy(self, tensor: str) -> str | None:
        """The module path in the name of a tensor that repeats the base model's weight; None for any other tensor."""

    def factor(self, tensor: str) -> tuple[str, Factor]:
        """The module path in a tensor's name, and which factor it is.

        Raises:
            AdapterFileError: it is not a factor of a LoRA pair.
        """

    def declared(self, path: str) -> tuple[int, float]:
        """Rank and scale of a module, from the config."""

    def contradiction(self, paths: Iterable[str], layout: AdapterLayout) -> str:
        """How the config contradicts that these linears have factors; "" if it does not."""


def format_of(config: Mapping[str, Any]) -> Format:
    """The format of a config. Raises AdapterFileError if it has neither or both, or needs an unsupported feature."""
    is_peft = "peft_type" in config
    is_mlx_lm = "fine_tune_type" in config or "lora_parameters" in config
    if is_peft and is_mlx_lm:
        raise problem(f"{CONFIG_FILE} has keys of both formats, PEFT's peft_type and mlx-lm's: keep those of one")
    if is_peft:
        return PeftFormat(config)
    if is_mlx_lm:
        return MlxLmFormat(config)
    raise problem(f"{CONFIG_FILE} has neither peft_type (PEFT) nor lora_parameters (mlx-lm): what wrote it?")


class MlxLmFormat:
    """The config of an mlx-lm adapter.

    Raises:
        AdapterFileError: `fine_tune_type` is not lora, or `lora_parameters` are malformed.
    """

    name: Literal["mlx-lm"] = "mlx-lm"
    weights_file = MLX_LM_WEIGHTS
    transposed = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        kind = config.get("fine_tune_type", "lora")
        if kind != "lora":
            called = _MLX_LM_KINDS.get(kind) if isinstance(kind, str) else None
            raise problem(
                f"{CONFIG_FILE}: {called or 'this kind of adapter'} is not supported: "
                f"fine_tune_type must be 'lora', got {described(kind)}"
            )
        parameters = config.get("lora_parameters")
        if not isinstance(parameters, dict):
            raise problem(f"{CONFIG_FILE}: lora_parameters must be an object with rank and scale")
        if "scale" not in parameters and "alpha" in parameters:
            raise problem(f"{CONFIG_FILE}: lora_parameters has alpha but no scale: give scale, alpha / rank")
        self._rank = rank_of(parameters.get("rank"), "lora_parameters.rank")
        self._scale = number_of(parameters.get("scale"), "lora_parameters.scale")
        self.rslora = flag_of(parameters.get("use_rslora") or False, "lora_parameters.use_rslora")
        self._keys, self._layers = parameters.get("keys"), config.get("num_layers")

    def base_copy(self, tensor: str) -> None:
        return None

    def factor(self, tensor: str) -> tuple[str, Literal["a", "b"]]:
        path, _, part = tensor.rpartition(".")
        if part == "lora_a":
            return path, "a"
        if part == "lora_b":
            return path, "b"
        if part == "m":
            raise problem(f"DoRA is not supported: {shown(tensor)} is its magnitude; train with fine_tune_type lora")
        raise problem(f"{shown(tensor)} is no lora_a or lora_b: only LoRA factors are supported")

    def declared(self, path: str) -> tuple[int, float]:
        return self._rank, self._scale

    def contradiction(self, paths: Iterable[str], layout: AdapterLayout) -> str:
        """mlx-lm makes the linears of `keys` in the last `num_layers` blocks; with 0 or less, in all. The tensors were
        trained, so all of them count."""
        blocks = [(index, key) for index, key in map(block_of, paths) if index is not None]
        if isinstance(self._keys, list) and (other := next((key for _, key in blocks if key not in self._keys), None)):
            fault = f"keys do not name {other}"
        elif type(self._layers) is int and any(0 < self._layers < layout.layers - index for index, _ in blocks):
            fault = f"num_layers is {self._layers} of {layout.layers}, but an earlier layer has factors too"
        else:
            return ""
        return f"{CONFIG_FILE} contradicts {self.weights_file}: {fault}. All factors are used; correct the config"


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
