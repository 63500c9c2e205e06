"""Numbers of an adapter's config. Every key is named in full in the errors: `lora_parameters.rank`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_parallm.adapters.files.disk import CONFIG_FILE, problem
from mlx_parallm.adapters.names import shown

_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_RANK = 2**20


def rank_of(value: Any, key: str) -> int:
    """A whole number, at least 1. (The model's shapes and --max-lora-rank bound it later.)

    Raises:
        AdapterFileError: it is not one.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_RANK:
        raise problem(f"{CONFIG_FILE}: {key} must be a whole number from 1 to {_LARGEST_RANK}, got {described(value)}")
    return value


def number_of(value: Any, key: str) -> float:
    """A number that float32 can hold.

    Raises:
        AdapterFileError: it is not one, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise problem(f"{CONFIG_FILE}: {key} must be a number, got {described(value)}")
    if not abs(value) <= _LARGEST:
        raise problem(f"{CONFIG_FILE}: {key} must be finite in float32, got {described(value)}")
    return float(value)


def described(value: Any) -> str:
    """A JSON value, cut short."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a huge whole number"
    return "nothing" if value is None else str(value)
