"""Recurrent layers: a mixer of tokens, such as a short convolution or Mamba's, that keeps a state for each row.

To an mlx-lm model, the tokens of a forward pass are a batch of single tokens; see `batch.forward`. Its attention knows
which of them belong to one row, and so must its mixers: the modules whose code uses an `ArraysCache`, which are found
by building a pass of one token. `install_mixers` gives each of them a class of its own, derived from mlx-lm's, that
hands packed tokens to the cache object if it is a `RowStates`. That calls mlx-lm's code for the tokens of some rows at
a time, with the states of these rows. Weights and paths of the mixer stay as they are.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from mlx_parallm.model.caches import Caches

Mixer = Callable[["Part", ArraysCache], Any]
"""(some rows of the pass, their states, which it replaces by those after the pass) → outputs, arrays [rows, T, ...]."""


class Part:
    """Rows with equally many tokens, which lie at [start, stop) of a pass of `tokens` packed tokens."""

    def __init__(self, start: int, stop: int, rows: int, tokens: int) -> None:
        self.start, self.stop, self.rows = start, stop, rows
        self._tokens = tokens

    def of(self, value: Any, offset: mx.array) -> Any:
        """What belongs to the part, of an argument of a mixer: packed arrays [N, 1, ...] become [rows, T, ...], the
        positions of all tokens those of the rows' first ones, and no mask is needed, because there is no padding."""
        if isinstance(value, PassMask):
            return None
        if value is offset:
            return offset[self.start : self.stop].reshape(self.rows, -1)[:, 0]
        if isinstance(value, mx.array) and value.shape[:2] == (self._tokens, 1):
            return value[self.start : self.stop].reshape(self.rows, -1, *value.shape[2:])
        return value


class PassMask:
    """Takes the place of a mask in a pass over packed tokens."""


class RowStates(ABC):
    """The cache object of a recurrent layer for one forward pass over packed tokens.

    `differentiates`: the pass has gradients. mlx-lm's kernels for Metal have none, so they are not used then. `offset`:
    the positions of all tokens, int32 [N].
    """

    differentiates = False
    offset: mx.array

    @abstractmethod
    def run(self, mixer: Mixer) -> Iterator[Any]:
        """What the mixer gives for each part of the pass, in order."""


def packed(outputs: Sequence[Any]) -> Any:
    """What a mixer gives for a pass, of what it gives for its parts: arrays [rows, T, ...] → [N, 1, ...]."""
    first = outputs[0]
    if isinstance(first, mx.array):
        return mx.concatenate([each.reshape(-1, 1, *each.shape[2:]) for each in outputs])
    if isinstance(first, list | tuple):
        return type(first)(packed(each) for each in zip(*outputs, strict=True))
    return first


def install_mixers(model: nn.Module) -> bool:
    """Lets the mixers of recurrent layers take packed tokens. Returns whether the model has any."""
    if not any(type(each) is ArraysCache for each in Caches(model).each):
        return False
    modules = dict(model.named_modules())
    if not any(hasattr(type(part), "takes_packed_tokens") for part in modules.values()):
        users = _users_of_states(model, modules)
        for path in users:
            if not any(path.startswith(f"{other}.") for other in users):
                kind: Any = type(modules[path])
                modules[path].__class__ = _packed(kind)
    return True


def _users_of_states(model: nn.Module, modules: dict[str, nn.Module]) -> set[str]:
    """The paths of the modules whose code uses an `ArraysCache`."""
    paths, users = {id(part): path for path, part in modules.items()}, set[str]()

    def note(frame: FrameType | None) -> None:
        while frame is not None:
            if (path := paths.get(id(frame.f_locals.get("self")))) is not None:
                users.add(path)
                return
            frame = frame.f_back

    class Watched(ArraysCache):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            note(sys._getframe(1))
            return super().__getitem__(index)

        def __setitem__(self, index: int, value: Any) -> None:
            note(sys._getframe(1))
            super().__setitem__(index, value)

    caches = Caches(model)
    watched = (Watched(len(each.cache)) if type(each) is ArraysCache else each for each in caches.each)
    model(mx.array([[0]]), cache=caches.nested(watched))
    return users


@cache
def _packed(kind: Any) -> Any:
    """A class of mixers that behaves as `kind`, except with a `RowStates`."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        states = next((each for each in (*args, *kwargs.values()) if isinstance(each, RowStates)), None)
        if states is None:
            return kind.__call__(self, *args, **kwargs)

        def of_part(part: Part, of_rows: ArraysCache) -> Any:
            def given(value: Any) -> Any:
                return of_rows if value is states else part.of(value, states.offset)

            return kind.__call__(self, *map(given, args), **{name: given(value) for name, value in kwargs.items()})

        before, self._training = self.training, states.differentiates
        try:
            return packed(list(states.run(of_part)))
        finally:
            self._training = before

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "takes_packed_tokens": True})
