"""Reads an adapter's directory, in one of the `formats`, without trusting it, and checks that it fits the model.

    the folder                                 lies in an allowed root, and its files are regular and of limited size
    the config and the weights file's header   give a plan for each pair: names, shapes and rank are checked
    the tensors                                are read then, and become the pairs

Safetensors files have the header's length in 8 bytes, the header, and the data
(https://github.com/huggingface/safetensors#format). PEFT saves copies of the base model's embedding and head beside the
factors with `save_embedding_layers`. One that equals the base model's weight changes nothing.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import stat
import struct
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from mlx_parallm.adapters.formats import CONFIG_FILE, FROZEN, Factor, Format, format_of, locate, problem
from mlx_parallm.adapters.weights import (
    AdapterLayout,
    AdapterWeights,
    LinearSpec,
    LoRAPair,
    VersionInfo,
    plain_path,
)
from mlx_parallm.errors import InvalidRequestError, shown

Float32 = NDArray[np.float32]

_MAX_PATH = 4096
_CONFIG_BYTES, _HEADER_BYTES = 2**20, 2**23
_MAX_AXES, _MAX_SIDE = 8, 2**48
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".npz")
_DAMAGED = "is truncated or damaged: copy or export it again"
# O_NONBLOCK: opening a pipe must not block the thread. O_NOFOLLOW: the path is resolved already.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class AdapterRoots:
    """The directories under which adapters may be read. Symlinks are resolved before a path is checked.

    Args:
        adapter_in: the directory of the adapter that a path means, such as that of a checkpoint.
    """

    def __init__(self, roots: Sequence[Path], adapter_in: Callable[[Path], Path] = lambda path: path) -> None:
        self._adapter_in = adapter_in
        self._roots = tuple(Path(os.path.realpath(root.expanduser())) for root in roots)

    def resolve(self, path: str) -> Path:
        """The real path of the directory of the adapter that `path` means. A relative `path` is tried against each root
        in turn, then against the working directory.

        Raises:
            InvalidRequestError: there is no root, or no such directory inside one. The message does not reveal
                whether `path` exists outside the roots.
        """
        if not self._roots:
            message = "no directory is allowed: start the server with --allowed-adapter-roots FOLDER, or --adapter-dir"
            raise InvalidRequestError(message, "lora_path")
        for start in (*self._roots, Path.cwd()) if 0 < len(path) <= _MAX_PATH else ():
            named = _real(start / path)
            real = _real(self._adapter_in(named)) if named is not None and self.inside(named) else None
            if real is not None and os.path.isdir(real) and self.inside(real) and self._is_spelled_so(real):
                return real
        raise InvalidRequestError(
            f"{shown(path)} is no directory inside the allowed roots, which are --adapter-dir and "
            "--allowed-adapter-roots: move it into one, or start the server with --allowed-adapter-roots FOLDER (a "
            "relative path is tried in each of them, and in the server's working directory)",
            "lora_path",
        )

    def _is_spelled_so(self, real: Path) -> bool:
        """Whether each part of the path below a root is spelled as in its folder."""
        root = max((root for root in self._roots if real.is_relative_to(root)), key=lambda root: len(root.parts))
        below = [real, *real.parents][: len(real.parts) - len(root.parts)]
        return all(map(is_spelled_so, below))

    def inside(self, path: Path) -> bool:
        """Whether the path, with symlinks resolved, is a root or lies under one."""
        real = _real(path)
        return real is not None and any(real.is_relative_to(root) for root in self._roots)


def is_spelled_so(path: Path) -> bool:
    """Whether the folder of a path has just this name. If not, and there is such a file, then the file system ignores
    case; patterns of names, as API keys have them, do not."""
    try:
        return path.name in os.listdir(path.parent)
    except OSError:  # what cannot be listed cannot be compared
        return False


def _real(path: Path) -> Path | None:
    """The path without symlinks; None if no file can have it, because of a NUL or a lone surrogate."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError):
        return None


def _open(path: Path, roots: AdapterRoots | None) -> BinaryIO:
    """Opens a regular file inside the roots, or anywhere if `roots` is None.

    Raises:
        AdapterFileError: the path leads out of the roots, is not a regular file, or cannot be read.
    """
    if roots is not None and not roots.inside(path):
        raise problem(f"{path.name} leads out of the allowed adapter roots: copy the file into the adapter's directory")
    try:
        descriptor = os.open(os.path.realpath(path), _FLAGS)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise problem(f"{path.name} cannot be read: {reason}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise problem(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def _read(file: BinaryIO, size: int, what: str) -> bytes:
    """Reads at most `size` bytes, fewer at the end of the file. `what` names the file in errors."""
    try:
        return file.read(size)
    except OSError as error:
        raise problem(f"{what} cannot be read: {error.strerror}") from error


def read_config(folder: Path, roots: AdapterRoots | None) -> dict[str, Any]:
    """Reads the adapter's config.

    Raises:
        AdapterFileError: it is missing, too large, or not a JSON object.
    """
    path = folder / CONFIG_FILE
    if not os.path.lexists(path):
        raise problem(f"there is no {CONFIG_FILE}: is it the directory of an mlx-lm or PEFT adapter?")
    with _open(path, roots) as file:
        data = _read(file, _CONFIG_BYTES + 1, CONFIG_FILE)
    if len(data) > _CONFIG_BYTES:
        raise problem(f"{CONFIG_FILE} is larger than {_CONFIG_BYTES} bytes: it is no adapter's config")
    return _parsed(data.removeprefix(codecs.BOM_UTF8), CONFIG_FILE)  # editors on Windows write that mark


def _parsed(data: bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object in UTF-8.

    Raises:
        AdapterFileError: it is not a JSON object, or has a key twice.
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise problem(f"{what} is not well-formed JSON: {error}") from error
    if not isinstance(value, dict):
        raise problem(f"{what} must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    merged = dict(pairs)
    if len(merged) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(key)} is there twice")
    return merged


# -- safetensors ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type and shape of one tensor, from the header."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def _read_header(file: BinaryIO, name: str) -> tuple[bytes, dict[str, TensorInfo]]:
    """The header of a safetensors file, with its length before it, and the tensors that it declares, by name.

    Raises:
        AdapterFileError: it is no safetensors file, or a tensor has an unsupported type.
    """
    prefix = _read(file, 8, name)
    if len(prefix) < 8:
        raise problem(f"{name} {_DAMAGED}")
    (length,) = struct.unpack("<Q", prefix)
    if length > _HEADER_BYTES:
        raise problem(f"{name} is no safetensors file: its header would be {length} bytes long")
    body = _read(file, length, name)
    if len(body) < length:
        raise problem(f"{name} {_DAMAGED}")
    entries = _parsed(body, f"the header of {name}")
    entries.pop("__metadata__", None)
    return prefix + body, {tensor: _info(tensor, entry) for tensor, entry in entries.items()}


def _read_rest(file: BinaryIO, name: str, header: bytes, tensors: Mapping[str, TensorInfo]) -> bytes:
    """All bytes of a safetensors file, of which the header has been read.

    Raises:
        AdapterFileError: it is not as long as its header says.
    """
    nbytes = sum(info.nbytes for info in tensors.values())
    # Check the file's length first, so that a false header cannot make us allocate what it claims.
    fits = os.fstat(file.fileno()).st_size == len(header) + nbytes
    data = header + _read(file, nbytes, name) if fits else header
    if len(data) != len(header) + nbytes:
        raise problem(f"{name} {_DAMAGED}; its tensors are not as long as its header says")
    return data


def _floats(data: bytes, name: str, tensors: Mapping[str, TensorInfo], wanted: Collection[str]) -> dict[str, Float32]:
    """Those of the wanted tensors that a safetensors file has, as float32. `data`: all its bytes.

    Raises:
        AdapterFileError: data and header do not agree, or a value is not finite.
    """
    try:
        stored = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise problem(f"{name} {_DAMAGED} ({shown(str(error))})") from error
    return {each: _widened(each, tensors[each], stored[each]["data"]) for each in wanted if each in stored}


def _missing(folder: Path, name: str) -> str:
    pickles = sorted(entry.name for entry in folder.glob("*") if entry.name.endswith(_PICKLES))
    if pickles:
        return f"{shown(pickles[0])} is not read, because it may run code: convert it to safetensors ({name})"
    return f"there is no {name} beside {CONFIG_FILE}: the weights must be in safetensors, in one file of that name"


def _info(name: str, entry: Any) -> TensorInfo:
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if not isinstance(dtype, str) or not isinstance(shape, list) or not _sides(shape):
        raise problem(f"the header's entry of {shown(name)} is malformed: export the file again")
    if dtype not in _ITEM_BYTES:
        raise problem(f"{shown(name)} has dtype {shown(dtype)}: store it as F32, F16 or BF16")
    return TensorInfo(dtype, tuple(shape))


def _sides(shape: list[Any]) -> bool:
    """Whether these can be the sides of an array. Errors quote a shape, so it may not be long."""
    return len(shape) <= _MAX_AXES and all(type(side) is int and 0 <= side < _MAX_SIDE for side in shape)


def _widened(name: str, info: TensorInfo, data: bytearray) -> Float32:
    if info.dtype == "BF16":  # the upper half of a float32
        array = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        array = np.frombuffer(data, "<f4" if info.dtype == "F32" else "<f2").astype(np.float32)
    if not np.isfinite(array).all():
        raise problem(f"{shown(name)} has values that are not finite: the training run diverged, use an earlier save")
    return array.reshape(info.shape)


def stored_tensor(file: Path, plain: str) -> tuple[str, Float32] | None:
    """Type and values of the tensor with this plain path in a file of the base model, None if it has no such floats.

    Raises:
        OSError, ValueError, struct.error: it is gone, or no safetensors file.
    """
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        tensors = json.loads(opened.read(length))
        floats = (name for name, tensor in tensors.items() if tensor.get("dtype") in _ITEM_BYTES)
        name = next((name for name in floats if plain_path(name) == plain), None)
        if name is None:
            return None
        info = TensorInfo(tensors[name]["dtype"], tuple(tensors[name]["shape"]))
        opened.seek(8 + length + tensors[name]["data_offsets"][0])
        return info.dtype, _widened(name, info, bytearray(opened.read(info.nbytes)))


# -- adapters --------------------------------------------------------------------------------------

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
    name = form.weights_file
    if not os.path.lexists(folder / name):
        raise problem(_missing(folder, name))
    with _open(folder / name, roots) as file:
        header, tensors = _read_header(file, name)
        copies = {tensor: path for tensor in tensors if (path := form.base_copy(tensor)) is not None}
        plans = _plans(form, tensors, {*copies, *others}, layout, max_rank)
        for tensor, path in copies.items():
            if FROZEN in tensor:
                _check_shape(tensor, tensors[tensor], locate(path, layout)[0])
        data = _read_rest(file, name, header, tensors)
    compared = {tensor: path for tensor, path in copies.items() if FROZEN not in tensor}
    factors = {factor for plan in plans.values() for factor in (plan.a, plan.b)}
    floats = _floats(data, name, tensors, [*factors, *compared, *others])
    for tensor, path in compared.items():
        _check_copy(tensor, path, tensors[tensor].dtype, floats[tensor], layout)
    pairs = {
        spec.path: _pair(plans[spec.path], floats, spec, form.transposed, max_rank)
        for spec in layout
        if spec.path in plans
    }
    weights = AdapterWeights(pairs, form.rslora)
    nbytes = sum(tensors[factor].nbytes for plan in plans.values() for factor in (plan.a, plan.b))
    digest, warning = _digest(data, plans), form.contradiction(plans, layout)
    info = replace(VersionInfo.of(weights), nbytes=nbytes, digest=digest, root=str(folder), warning=warning)
    return AdapterFile(weights, info), {tensor: floats[tensor] for tensor in others if tensor in floats}


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
