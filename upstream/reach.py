"""Prints which of mlx-lm's model files the attention seam does not reach, from a prompt and a token of tiny models.

python upstream/reach.py

The configurations are those of our tests (tests/model/configurations.json). A cache is reached if attention asks it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from patched import copy_patched

FOLDER = tempfile.TemporaryDirectory()
copy_patched(Path(FOLDER.name))
sys.path[:0] = [FOLDER.name, str(Path(__file__).parents[1] / "tests")]

import mlx.core as mx  # noqa: E402 (from the patched copy, as all below)
import mlx.nn as nn  # noqa: E402
from family_checks import CONFIGURATIONS, ELSEWHERE, build  # noqa: E402
from mlx_lm.models.cache import CacheList, make_prompt_cache  # noqa: E402

PROMPT, TOKEN = [1, 2, 3, 1, 2], [3]
FUSED = mx.fast.scaled_dot_product_attention


class Calls:
    """Of one pass: the caches that got keys, those that attention asked, and calls of MLX's attention past the seam."""

    def __init__(self) -> None:
        self.updated: set[int] = set()
        self.asked: set[int] = set()
        self.past = 0


calls = Calls()


def spied(kind: type) -> type:
    """This class of caches, which notes its calls and answers attention."""

    class Spy(kind):
        def update_and_fetch(self, *arrays: mx.array) -> Any:
            calls.updated.add(id(self))
            return super().update_and_fetch(*arrays)

        def attend(self, queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
            calls.asked.add(id(self))
            return FUSED(queries, keys, values, **options)

    return Spy


def spy_on(cache: Any) -> None:
    if isinstance(cache, CacheList):
        for each in cache.caches:
            spy_on(each)
    elif hasattr(cache, "update_and_fetch"):
        cache.__class__ = spied(type(cache))


def count_past(*arrays: mx.array, **options: Any) -> mx.array:
    calls.past += 1
    return FUSED(*arrays, **options)


def what_is_missed(model: nn.Module) -> str:
    """What the seam does not reach, in words; empty if it reaches all."""
    global calls
    expected_caches, caches = make_prompt_cache(model), make_prompt_cache(model)
    for cache in caches:
        spy_on(cache)
    missed = ""
    for tokens in (PROMPT, TOKEN):
        expected = model(mx.array([tokens]), cache=expected_caches)
        calls = Calls()
        error = mx.abs(model(mx.array([tokens]), cache=caches) - expected).max().item()
        assert error < 1e-4, error
        silent, past = len(calls.updated - calls.asked), calls.past
        missed = f"{silent} of {len(calls.updated)} caches not asked, {past} calls past it" if silent or past else ""
    return missed


mx.fast.scaled_dot_product_attention = count_past
names = [name for name in CONFIGURATIONS if name not in ELSEWHERE]
missed = {name: what for name in names if (what := what_is_missed(build(name)))}
print(f"{len(names) - len(missed)} of {len(names)} configurations are reached. The others:")
for name, what in missed.items():
    print(f"{name}: {what}")
