"""What a model's caches keep for each sequence, and which of its modules run in parts: found by a pass of one token.

The pass is built and not computed, with objects in place of caches that note which module uses them. Keys and values
that reach mlx-lm's `scaled_dot_product_attention` as a cache has returned them need nothing else: the pass over packed
tokens answers (see `hooks`). Every other user of a cache is a mixer (see `mixers`). If a user is inside of another one,
the outer one is the mixer.

A *compatible* plan assumes nothing about the model: its whole trunk is a mixer, and each sequence is a part. It is
right for whatever mlx-lm can run, and as slow as sequences one by one. Caches that are neither keys and values nor
arrays need it: each sequence has its own, and how many bytes they take is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, RotatingKVCache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.hooks import answered_by, hook_model
from mlx_parallm.model.layer_state import Caches, KVLayout, LayerSpec, LayerState, OpaqueSpec, RecurrentSpec, arrays_of
from mlx_parallm.model.mixers import PassMask, install_mixers
from mlx_parallm.model.split import trunk_of

_MEASURED = 256, 512
"""Tokens of the two sequences whose caches are measured. Caches grow by up to 256 tokens at a time."""
_SEQUENCES = 13
"""Sequences of the pass that finds the shape of masks: a number that no model has as its number of heads."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How a model runs over packed tokens.

    layout: what each of its caches keeps
    vocab_size: width of the logits; it may be larger than the tokenizer's
    mixers: the paths of the modules that run in parts
    in_parts: the numbers of the caches that they use
    crossing: the numbers of the caches that more than one layer uses
    mask_axes: axes between rows and queries in the masks that mixers get: one of heads, or another one of groups
    compatible: see above
    """

    layout: KVLayout
    vocab_size: int
    mixers: tuple[str, ...] = ()
    in_parts: frozenset[int] = frozenset()
    crossing: frozenset[int] = frozenset()
    mask_axes: int = 1
    compatible: bool = False


def prepare(model: nn.Module, compatible: bool = False) -> CachePlan:
    """Lets a loaded model run over packed tokens, and says how. It may be called again. What the model gives for
    mlx-lm's own caches does not change.

    Args:
        compatible: the plan is a compatible one. It is anyway if positions depend on the length of the whole sequence,
            or if only the model's own code understands its caches.

    Raises:
        UnsupportedModelError: the model does not run.
    """
    install_mixers(model, ())
    hook_model(model)
    if Caches(model).opaque:
        return _opaque_plan(model)
    compatible = compatible or any(isinstance(part, DynamicNTKScalingRoPE) for part in model.modules())
    traced, vocab_size, logits_dtype = _traced(model)
    mixers = _trunk_path(model) if compatible else _outermost(traced)
    in_parts = frozenset(n for n, each in enumerate(traced) if any(_inside(user, mixers) for user in each.users))
    layers = tuple(_state(model, number, each, number in in_parts) for number, each in enumerate(traced))
    dtypes = {each.keys.dtype for each in traced if isinstance(each, _TracedKeys) and each.keys is not None}
    if len(dtypes) > 1:
        raise UnsupportedModelError(f"{_name(model)} mixes types of keys and values: {sorted(map(str, dtypes))}")
    layout = KVLayout(layers, dtypes.pop() if dtypes else logits_dtype)
    crossing = frozenset(number for number, each in enumerate(traced) if len(_layers_of(model, each.users)) > 1)
    axes = 1
    if not compatible and any(number in in_parts for number in layout.attention):
        axes = _mask_axes(model)
    install_mixers(model, mixers)
    return CachePlan(layout, vocab_size, tuple(mixers), in_parts, crossing, axes, compatible)


def _opaque_plan(model: nn.Module) -> CachePlan:
    empty, (fewer, more), mixers = Caches(model).each, _MEASURED, _trunk_path(model)
    try:
        (before, _), (after, logits) = _filled(model, fewer), _filled(model, more)
    except Exception as error:  # the model file is foreign code
        raise UnsupportedModelError(f"{_name(model)} does not run with its own caches: {error}") from error
    growth = [max(0, -((one - other) // (more - fewer))) for one, other in zip(before, after, strict=True)]
    layers = tuple(
        OpaqueSpec(cache, max(1, nbytes - fewer * grown), grown)
        for cache, nbytes, grown in zip(empty, before, growth, strict=True)
    )
    install_mixers(model, mixers)
    layout, in_parts = KVLayout(layers, logits.dtype), frozenset(range(len(layers)))
    return CachePlan(layout, logits.shape[-1], tuple(mixers), in_parts, compatible=True)


def _filled(model: nn.Module, tokens: int) -> tuple[list[int], mx.array]:
    """The bytes of each cache after a sequence of so many tokens, and its logits. The pass is built, not computed."""
    expected = Caches(model)
    logits = model(mx.zeros((1, tokens), mx.int32), cache=expected.nested(expected.each))
    return [sum(array.nbytes for array in arrays_of(cache)) for cache in expected.each], logits


# -- what one token shows ------------------------------------------------------------------------


@dataclass(eq=False)
class _Traced:
    """Takes the place of an empty cache. `users`: the paths of the modules whose code uses it. `number`: its index
    among all caches."""

    number: int
    trace: _Trace
    users: set[str] = field(default_factory=set)

    def note(self) -> None:
        """Call it in a method that the model calls."""
        self.users.add(self.trace.path_of(sys._getframe(2)))


class _TracedKeys(_Traced):
    """Records the keys and values that a layer stores, and whether attention gets them.

    windows: those of the attention that gets them. window: that of the cache whose place it takes.
    """

    offset = start_position = 0

    def __init__(self, number: int, trace: _Trace, cache: Any) -> None:
        super().__init__(number, trace)
        self.window = int(cache.max_size) if type(cache) is RotatingKVCache else None
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.windows: list[int | None] = []
        self.is_latent = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the token's keys and values, each [1, kv_heads, 1, head_dim], as a cache without others does."""
        self.note()
        self.keys, self.values = keys, values
        self.trace.owners[id(keys)] = self
        return keys, values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """The same again, for a layer that shares them."""
        self.note()
        return self.keys, self.values

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self.trace.mask(self.number, window_size or self.window)

    def maybe_trim_front(self) -> None:
        """Does nothing: there is nothing before the token."""


class _TracedArrays(_Traced, ArraysCache):  # type: ignore[misc]
    """The arrays of a recurrent state."""

    def __init__(self, number: int, trace: _Trace, cache: Any) -> None:
        ArraysCache.__init__(self, len(cache.cache))
        _Traced.__init__(self, number, trace)

    def __getitem__(self, index: int) -> Any:
        self.note()
        return super().__getitem__(index)

    def __setitem__(self, index: int, value: Any) -> None:
        self.note()
        super().__setitem__(index, value)


class _Trace:
    """Implements `hooks.Attention` for one token: gives outputs of the right shape, and notes whose keys it gets.

    `mask`: what caches give as masks, of their number and their window.
    """

    takes_heads = False
    heads: Any = None

    def __init__(self, model: nn.Module, mask: Callable[[int, int | None], Any]) -> None:
        self.mask = mask
        self.owners: dict[int, _TracedKeys] = {}
        self._paths: dict[int, str] = {id(part): path for path, part in model.named_modules()}

    def path_of(self, frame: FrameType | None) -> str:
        """The path of the innermost module whose code runs."""
        while frame is not None:
            if (path := self._paths.get(id(frame.f_locals.get("self")))) is not None:
                return path
            frame = frame.f_back
        return ""

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: object,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """See `hooks.Attention.attend`. Of latent attention, the scores of the keys' part with positions come as the
        mask. A mask of the model's own making is one that no pass can answer."""
        owner = self.owners.get(id(keys), cache)
        if isinstance(owner, _TracedKeys):
            if isinstance(mask, PassMask) or mask is None:
                owner.windows.append(owner.window if mask is None else mask.window)
            elif isinstance(mask, mx.array) and mask.shape == (*queries.shape[:3], 1) and keys.shape[1] == 1:
                owner.is_latent = True
                owner.windows.append(owner.window)
        return mx.broadcast_to(values[:, :1], (*queries.shape[:3], values.shape[3]))


def _traced(model: nn.Module) -> tuple[list[_Traced], int, mx.Dtype]:
    """What each cache has noted; the width and the type of the logits."""
    token = mx.array([[0]])
    with suppress(Exception):  # the model file is foreign code; the second pass shows what is wrong
        return _pass(model, token, PassMask)
    try:
        return _pass(model, token, lambda *_: None)  # code that computes with its mask needs none
    except UnsupportedModelError:
        raise
    except Exception as error:  # the model file is foreign code
        raise UnsupportedModelError(f"{_name(model)} does not run with a plain KV cache: {error}") from error


def _pass(
    model: nn.Module, tokens: mx.array, mask: Callable[[int, int | None], Any], answered: bool = True
) -> tuple[list[_Traced], int, mx.Dtype]:
    """Builds a pass of sequences of one token. `answered`: by the trace, in place of mlx-lm's own attention."""
    expected, trace = Caches(model), _Trace(model, mask)
    caches: list[_Traced] = [
        (_TracedArrays if type(cache) is ArraysCache else _TracedKeys)(number, trace, cache)
        for number, cache in enumerate(expected.each)
    ]
    with answered_by(trace if answered else None):
        logits = model(tokens, cache=expected.nested(caches))
    return caches, logits.shape[-1], logits.dtype


def _outermost(traced: list[_Traced]) -> set[str]:
    """The modules that run in parts: users of caches whose keys attention does not get, or users around them."""
    users = {user for each in traced for user in each.users}
    needed = {user for each in traced if not getattr(each, "windows", None) for user in each.users}
    around = {user for user in users if any(_inside(need, (user,)) for need in needed)}
    return {user for user in around if not _inside(user, around - {user})}


def _inside(path: str, others: Collection[str]) -> bool:
    return any(path == other or not other or path.startswith(f"{other}.") for other in others)


def _trunk_path(model: nn.Module) -> set[str]:
    trunk = trunk_of(model)
    return {next(path for path, part in model.named_modules() if part is trunk)} if trunk is not None else {""}


def _layers_of(model: nn.Module, users: Collection[str]) -> set[str]:
    """The paths of the layers that these modules belong to; of a module outside of them, its own path."""
    layers = {id(layer) for layer in model.layers}
    paths = [path for path, part in model.named_modules() if id(part) in layers]
    return {next((path for path in paths if _inside(user, (path,))), user) for user in users}


def _state(model: nn.Module, number: int, traced: _Traced, in_parts: bool) -> LayerState:
    if not traced.users:
        return None
    if isinstance(traced, _TracedArrays):
        if any(array is None for array in traced.cache):
            raise UnsupportedModelError(f"{_name(model)}: cache {number} does not get all arrays of its state")
        return RecurrentSpec(
            tuple(tuple(array.shape[1:]) for array in traced.cache), tuple(array.dtype for array in traced.cache)
        )
    assert isinstance(traced, _TracedKeys)
    if traced.keys is None or traced.values is None:
        raise UnsupportedModelError(f"{_name(model)}: cache {number} does not get keys and values")
    kv_heads, head_dim_k, head_dim_v = traced.keys.shape[1], traced.keys.shape[3], traced.values.shape[3]
    if in_parts:
        return LayerSpec(kv_heads, head_dim_k, head_dim_v, traced.window)
    window = None if None in traced.windows else max(each for each in traced.windows if each is not None)
    if traced.is_latent:
        return LayerSpec(1, head_dim_k + head_dim_v, 0, window, latent=head_dim_k)
    return LayerSpec(kv_heads, head_dim_k, head_dim_v, window)


def _mask_axes(model: nn.Module) -> int:
    """See `CachePlan.mask_axes`: 1, if a pass of several sequences runs with such masks, else 2."""
    for axes in (1, 2):
        mask = mx.ones((_SEQUENCES, *[1] * axes, 1, 1), mx.bool_)
        with suppress(Exception):  # the model file is foreign code; its shapes do not fit
            _pass(model, mx.zeros((_SEQUENCES, 1), mx.int32), lambda *_, mask=mask: mask, answered=False)
            return axes
    return 1


def _name(model: nn.Module) -> str:
    return str(getattr(model, "model_type", type(model).__module__))
