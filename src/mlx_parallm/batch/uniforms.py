"""Counter-based randomness: one uniform per row and token position, made on the host without reading any token.

`uniform(seed, position)` is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014) read at an index: the seed, mixed, gives the start of the row's stream; the position
is how far along it we are. A row preempted and recomputed goes on at the same position, so it draws the
same tokens, and neighbours never matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BITS = 24
"""An fp32 holds every k / 2**24 exactly, so the largest uniform stays below 1."""


def streams(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """Start of each seed's stream, uint64 [n]. A seed counts modulo 2**64."""
    return _mix(np.array([seed % 2**64 for seed in seeds], np.uint64) * _GAMMA + _GAMMA)


def uniforms(starts: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """fp32 [n] in [0, 1), multiples of 2**-24: the draw of each stream at its position (>= 0)."""
    mixed = _mix(starts + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (mixed >> np.uint64(64 - _BITS)).astype(np.float32) * np.float32(2.0**-_BITS)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
