"""Recurrent layers: a mixer of tokens, such as a short convolution or Mamba's, that keeps a state for each row.

To an mlx-lm model, the tokens of a forward pass are a batch of single tokens; see `batch.forward`. Its attention knows
which of them belong to one row, and so must its mixers. `install_mixers` gives each of them a class of its own, derived
from mlx-lm's, that hands the packed tokens to the cache object if it is a `RowStates`. That calls mlx-lm's code for the
tokens of some rows at a time, with the states of these rows. Weights and paths of the mixer stay as they are.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

MIXERS = {"lfm2": "conv", "mamba": "mixer", "mamba2": "mixer", "qwen3_next": "linear_attn"}
"""The name of a layer's mixer in the mlx-lm model files whose recurrent layers are tested. A row begins with zeros."""

_MOST_ARRAYS = 2
"""The most arrays that such a mixer keeps."""

Mixer = Callable[[mx.array, ArraysCache], mx.array]
"""(inputs [rows, T, in], the states of these rows, which it replaces by those after T tokens) → outputs [rows, T, out].
"""


class RowStates(ABC):
    """The cache object of a recurrent layer for one forward pass over packed tokens.

    `differentiates`: the pass has gradients. mlx-lm's kernels for Metal have none, so they are not used then.
    """

    differentiates = False

    @abstractmethod
    def run(self, mixer: Mixer, x: mx.array) -> mx.array:
        """The outputs of packed tokens, [N, 1, in] → [N, 1, out], by calls of the mixer for rows of one length."""


def states_of_rows(arrays: Sequence[mx.array] | None) -> ArraysCache:
    """A mixer's cache with the states of some rows, each [rows, ...]; None: they have no tokens yet."""
    states = ArraysCache(_MOST_ARRAYS)
    for index, array in enumerate(arrays or ()):
        states[index] = array
    return states


def arrays_of(states: ArraysCache) -> list[mx.array]:
    """The arrays that a mixer has set."""
    return [array for array in states.cache if array is not None]


def install_mixers(model: nn.Module) -> bool:
    """Lets the mixers of recurrent layers take packed tokens. Returns whether the model has any."""
    name = MIXERS.get(type(model).__module__.rpartition(".")[2])
    mixers = [getattr(layer, name) for layer in model.layers if hasattr(layer, name)] if name else []
    for mixer in mixers:
        kind: Any = type(mixer)
        mixer.__class__ = kind if hasattr(kind, "takes_packed_tokens") else _packed(kind)
    return bool(mixers)


@cache
def _packed(kind: Any) -> Any:
    """A class of mixers that behaves as `kind`, except with a `RowStates`."""
    mask = {"mask": None} if "mask" in inspect.signature(kind.__call__).parameters else {}

    def call(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        given = (*args, *kwargs.values())
        states = next((each for each in given if isinstance(each, RowStates)), None)
        if states is None:
            return cast(mx.array, kind.__call__(self, x, *args, **kwargs))
        before, self._training = self.training, states.differentiates
        try:
            return states.run(lambda part, of_rows: kind.__call__(self, part, **mask, cache=of_rows), x)
        finally:
            self._training = before

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "takes_packed_tokens": True})
