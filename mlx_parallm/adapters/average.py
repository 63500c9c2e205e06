"""The weighted mean of adapters, as federated learning takes it: the mean of what they add to each linear.

Each adapter adds scale · a b, [in, out], to a linear. The mean of these products is exact with as many ranks as the
adapters have together. The mean of the factors themselves would be another matrix, because a b is not linear in both.
A lower rank keeps the largest singular values of each mean, which is its best approximation of that rank in the
Frobenius norm (Eckart and Young, 1936).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair
from mlx_parallm.errors import AdapterFileError, ConfigError

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reduction:
    """What a lower rank does to the mean of one linear. `norm`: Frobenius norm of the mean; `lost`: of what is left
    out of it."""

    norm: float
    lost: float

    @property
    def error(self) -> float:
        """The lost part of the norm, 0 to 1."""
        return self.lost / self.norm if self.norm else 0.0


@dataclass(frozen=True, slots=True)
class Average:
    """The mean of adapters. `full_rank`: the rank at which it is exact; `reductions`: by the path of each linear."""

    weights: AdapterWeights
    full_rank: int
    reductions: Mapping[str, Reduction]

    @property
    def error(self) -> float:
        """The lost part of the Frobenius norm of all linears together, 0 to 1."""
        found = self.reductions.values()
        lost, norm = (math.hypot(*values) for values in zip(*((r.lost, r.norm) for r in found), strict=True))
        return Reduction(norm, lost).error

    @property
    def worst(self) -> str:
        """The path of the linear that loses the largest part of its norm."""
        return max(self.reductions, key=lambda path: self.reductions[path].error)


def average(adapters: Sequence[AdapterWeights], weights: Sequence[float] | None, rank: int | None = None) -> Average:
    """The weighted mean of adapters of one base model. Their ranks, scales and linears may differ: an adapter adds
    nothing to a linear that it does not have.

    It is computed in float64 and stored in float32, with scale 1. The columns of each a are orthonormal.

    Args:
        adapters: NumPy arrays.
        weights: one above 0 for each adapter, such as its number of examples. They are divided by their sum. None: all
            adapters weigh the same.
        rank: largest rank of a linear; None: the mean is exact.

    Raises:
        ConfigError: there are fewer than two adapters, or weights or rank do not fit them.
        AdapterFileError: the mean is too large for float32.
    """
    shares = _shares(len(adapters), weights)
    paths = list(dict.fromkeys(path for adapter in adapters for path in adapter.pairs))
    members = {
        path: [(s, a.pairs[path]) for s, a in zip(shares, adapters, strict=True) if path in a.pairs] for path in paths
    }
    full_rank = max(_full_rank([pair for _, pair in of_path]) for of_path in members.values())
    if rank is not None and not 1 <= rank <= full_rank:
        raise ConfigError(
            f"--rank: {rank} is not between 1 and {full_rank}, the rank at which the mean of these adapters is exact"
        )
    pairs: dict[str, LoRAPair] = {}
    reductions: dict[str, Reduction] = {}
    for path, of_path in members.items():
        pairs[path], reductions[path] = _mean(path, of_path, rank or full_rank)
    return Average(AdapterWeights(pairs), full_rank, reductions)


def _full_rank(pairs: Sequence[LoRAPair]) -> int:
    """The largest rank that a sum of these products can have."""
    inputs, outputs = pairs[0].a.shape[-2], pairs[0].b.shape[-1]
    return min(sum(pair.rank for pair in pairs), int(inputs), int(outputs))


def _shares(count: int, weights: Sequence[float] | None) -> list[float]:
    if count < 2:
        raise ConfigError(f"an average is of two adapters or more, got {count}")
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise ConfigError(f"--weights: {len(weights)} for {count} adapters; give one weight for each adapter")
    if bad := [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]:
        raise ConfigError(
            f"--weights: {bad[0]:g} is not a finite number above 0; leave out an adapter that weighs nothing"
        )
    total = math.fsum(weight / max(weights) for weight in weights)
    return [weight / max(weights) / total for weight in weights]


def _mean(path: str, members: Sequence[tuple[float, LoRAPair]], rank: int) -> tuple[LoRAPair, Reduction]:
    """The mean of one linear's products, or of each expert's, of this rank at most.

    With the factors of all members side by side it is `left` [..., in, R] times `right` [..., R, out]. QR of both
    leaves a core of R x R at most, whose singular value decomposition is that of the mean.
    """
    left = np.concatenate([_float64(pair.a) for _, pair in members], axis=-1)
    right = np.concatenate([share * pair.scale * _float64(pair.b) for share, pair in members], axis=-2)
    if not np.isfinite(right).all():
        raise _too_large(path)
    q_left, r_left = np.linalg.qr(left)
    q_right, r_right = np.linalg.qr(right.swapaxes(-1, -2))
    u, values, vt = np.linalg.svd(r_left @ r_right.swapaxes(-1, -2), full_matrices=False)
    a = (q_left @ u[..., :rank]).astype(np.float32)
    with np.errstate(over="ignore"):
        b = (values[..., :rank, None] * (vt[..., :rank, :] @ q_right.swapaxes(-1, -2))).astype(np.float32)
    if not np.isfinite(b).all():
        raise _too_large(path)
    lost, norm = np.linalg.norm(values[..., rank:]), np.linalg.norm(values)
    return LoRAPair(a, np.ascontiguousarray(b), 1.0), Reduction(float(norm), float(lost))


def _float64(array: Any) -> Float64:
    return np.asarray(array, np.float64)


def _too_large(path: str) -> AdapterFileError:
    return AdapterFileError(
        f"the mean of {path} is too large for float32: one of the adapters has diverged", "lora_path"
    )
