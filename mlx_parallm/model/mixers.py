"""Mixers: the modules of a model that use a cache in code of their own, and so must know which tokens form a sequence.

To an mlx-lm model, the tokens of a forward pass are a batch of single tokens, [N, 1]; see `batch.forward`. Norms, MLPs
and experts see one token at a time, and attention is answered by the pass (see `hooks`). All else that uses a cache is
a mixer: a short convolution, Mamba's, an attention with code of its own. `cache_plan` finds them, and `install_mixers`
gives each of them a class, derived from mlx-lm's, that hands packed tokens to the cache object if it is a `PassCache`:
mlx-lm's code is called for the rows of one part of the pass after the other, with caches of these rows. Weights and
paths of the mixer stay as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList

from mlx_parallm.model.hooks import InPart, answered_by


@dataclass(frozen=True, slots=True)
class PassMask:
    """Takes the place of a mask in a pass over packed tokens. `number`: of the cache that made it. `window`: how many
    last tokens a query sees, itself included; None: all."""

    number: int
    window: int | None


Call = Callable[..., Any]


class PassCache(ABC):
    """Takes the place of one of the model's caches for one forward pass over packed tokens.

    `number`: its index among the caches that the model expects. `offset`: the positions of all tokens, int32 [N].
    `differentiates`: the pass has gradients. mlx-lm's kernels for Metal have none, so they are not used then.
    """

    differentiates = False
    number: int
    offset: mx.array

    @abstractmethod
    def parts(self) -> Iterator[Part]:
        """The parts of the pass, in order. While one is given, adapted linears use the adapters of its rows."""


class Part(ABC):
    """Rows with equally many tokens, which lie at [start, stop) of a pass. `offset`: the position of their first
    tokens, one for each row, int32 [rows], if they differ."""

    kind = InPart.SERVED

    def __init__(self, start: int, stop: int, rows: int, offset: int | mx.array) -> None:
        self.start, self.stop, self.rows, self.offset = start, stop, rows, offset

    @abstractmethod
    def cache(self, number: int) -> Any:
        """What mlx-lm's code gets in place of the pass' cache: that of these rows."""

    @abstractmethod
    def mask(self, mask: PassMask) -> mx.array | None:
        """The mask of these rows: true where a query may attend to a key. None: none is needed."""

    def run(
        self, mixer: nn.Module, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], positions: mx.array
    ) -> Any:
        """What a mixer gives for these rows. `call`: its code for whole rows. `positions`: those of all tokens."""
        with answered_by(self.kind):
            return call(*self.of(args, positions), **self.of(kwargs, positions))

    def of(self, value: Any, positions: mx.array) -> Any:
        """What belongs to the part, of the arguments of a mixer: packed arrays [N, 1, ...] become [rows, T, ...]."""
        if isinstance(value, PassCache):
            return self.cache(value.number)
        if isinstance(value, PassMask):
            return self.mask(value)
        if isinstance(value, CacheList):
            return CacheList(*(self.of(each, positions) for each in value.caches))
        if isinstance(value, list | tuple):
            return type(value)(self.of(each, positions) for each in value)
        if isinstance(value, Mapping):
            return {name: self.of(each, positions) for name, each in value.items()}
        if value is positions:
            return self.offset
        if isinstance(value, mx.array) and value.shape[:2] == (positions.size, 1):
            return self.rows_of(value)
        return value

    def rows_of(self, tokens: mx.array) -> mx.array:
        """[N, 1, ...] → [rows, T, ...]."""
        return tokens[self.start : self.stop].reshape(self.rows, -1, *tokens.shape[2:])


def joined(outputs: Sequence[Any], join: Callable[[list[mx.array]], mx.array]) -> Any:
    """What a mixer gives in all, of what it gives part by part, in any nesting of tuples and lists."""
    first = outputs[0]
    if isinstance(first, mx.array):
        return join(list(outputs))
    if isinstance(first, list | tuple):
        return type(first)(joined(each, join) for each in zip(*outputs, strict=True))
    return first


def _packed(outputs: list[mx.array]) -> mx.array:
    """[rows, T, ...] of all parts → [N, 1, ...]."""
    return mx.concatenate([each.reshape(-1, 1, *each.shape[2:]) for each in outputs])


def install_mixers(model: nn.Module, paths: Collection[str]) -> None:
    """Lets the modules at these paths take packed tokens, and no others."""
    for path, module in model.named_modules():
        kind: Any = getattr(type(module), "of_whole_rows", type(module))
        module.__class__ = _of_packed_tokens(kind) if path in paths else kind


@cache
def _of_packed_tokens(kind: Any) -> Any:
    """A class of mixers that behaves as `kind`, except with a `PassCache`."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = next(_pass_caches([*args, *kwargs.values()]), None)
        if given is None:
            return kind.__call__(self, *args, **kwargs)
        whole = partial(_differentiated if given.differentiates else kind.__call__, self)
        return joined([part.run(self, whole, args, kwargs, given.offset) for part in given.parts()], _packed)

    def _differentiated(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with training_mode(self, True):
            return kind.__call__(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "of_whole_rows": kind})


def _pass_caches(values: Sequence[Any]) -> Iterator[PassCache]:
    for value in values:
        if isinstance(value, PassCache):
            yield value
        elif isinstance(value, CacheList | list | tuple):
            yield from _pass_caches(value.caches if isinstance(value, CacheList) else value)


@contextmanager
def training_mode(module: nn.Module, mode: bool) -> Iterator[None]:
    """While the block runs, a module and all in it have the flag by which mlx-lm's code chooses a kernel with a
    gradient. Dropouts do not get it: an answer is what it is when it is served."""
    changed = [each for each in module.modules() if each.training != mode and not isinstance(each, nn.Dropout)]
    for each in changed:
        each._training = mode
    try:
        yield
    finally:
        for each in changed:
            each._training = not mode
