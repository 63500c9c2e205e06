"""A pass with gradients over packed tokens (see `packing`): the objects that take the place of a model's caches.

A branch is one part, and so is a bucket. What rows share is computed once: the keys, values and states after a branch's
own tokens are what each of its rows, and of the branches in it, begins with. Padding is at the end of a row, and
nothing after it is read.

A mixer that keeps a state of a fixed size runs in segments, each of which the backward pass computes again. Between
them only the states are kept, so the memory of a long row does not grow with what mlx-lm's code keeps for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.model.cache_plan import CachePlan
from mlx_parallm.model.hooks import InPart, answered_by, answering
from mlx_parallm.model.layer_state import LayerSpec, RecurrentSpec
from mlx_parallm.model.linears import LatentHeads
from mlx_parallm.model.mixers import Call, Part, PassCache, PassMask, joined
from mlx_parallm.train.attention import PackedAttention, PackedPart, causal
from mlx_parallm.train.context import Params, TrainingContext, adapted_paths
from mlx_parallm.train.recomputation import floats_of, recomputed

SEGMENT, SHORT_SEGMENT = 256, 32
"""Tokens of a segment, in all rows. The short one is for models whose memory grows with the square of them, as that of
some loops over tokens does."""


class LearnedPass:
    """One pass with gradients. Implements `hooks.Attention`.

    `positions`: of all tokens, int32 [N]. `segment`: tokens of a segment.
    """

    def __init__(
        self, attention: PackedAttention, positions: mx.array, plan: CachePlan, bank: AdapterBank, segment: int
    ) -> None:
        self.attention, self.offset = attention, positions
        self.plan, self.bank, self.segment = plan, bank, segment
        self.takes_heads = plan.layout.is_latent
        self.heads: LatentHeads | None = None
        self.caches = [LearnedCache(self, number) for number in range(len(plan.layout.layers))]
        self._latents: dict[int, tuple[mx.array, mx.array]] = {}
        self._split: dict[int, tuple[mx.array, Sequence[mx.array]]] = {}

    def again(self) -> LearnedPass:
        """The same before it has run."""
        return LearnedPass(self.attention, self.offset, self.plan, self.bank, self.segment)

    def finish(self) -> None:
        """Drops all arrays. Call it when the pass is built: its caches and parts hold each other."""
        self.caches.clear()
        self._latents.clear()
        self._split.clear()
        for part in vars(self).pop("parts", ()):
            part.finish()

    @cached_property
    def parts(self) -> list[RowsOfBranch]:
        """The parts of the pass, in order."""
        found: dict[PackedPart | None, RowsOfBranch] = {}
        for number, packed in enumerate(self.attention.parts):
            found[packed] = RowsOfBranch(self, packed, number, found.get(packed.above))
        return list(found.values())

    def split(self, tokens: mx.array) -> Sequence[mx.array]:
        """See `PackedAttention.split`. Every array is split once."""
        if id(tokens) not in self._split:
            self._split[id(tokens)] = tokens, self.attention.split(tokens)
        return self._split[id(tokens)][1]

    def own_latent(self, latent: mx.array, positions: mx.array) -> None:
        """Adds, to keys that are the latent, the part that has positions. See `batch.forward.LayerCache`."""
        self._latents[id(latent)] = latent, positions

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
        """See `hooks.Attention.attend`: of all tokens, arrays [N, heads, 1, head_dim].

        Raises:
            TypeError: the model made an attention mask of its own.
        """
        window = None
        if (found := self._latents.get(id(keys))) is not None:
            queries, scale = mx.concatenate([queries * scale, mask], -1), 1.0
            keys = mx.concatenate([keys, found[1]], -1)
            heads, self.heads = self.heads, None
            keys, values = (keys, values) if heads is None else heads.expanded(keys)
        elif isinstance(mask, PassMask):
            window = mask.window
        elif mask is not None:
            raise TypeError("the model makes its own attention mask; it cannot be trained")
        return self.attention.attend(queries, keys, values, scale, window, sinks)


class LearnedCache(PassCache):
    """One cache of a pass with gradients."""

    differentiates = True

    def __init__(self, of_pass: LearnedPass, number: int) -> None:
        self.number = number
        self.offset = of_pass.offset
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.of_pass = of_pass
        self._spec = of_pass.plan.layout.layers[number]
        self._crosses = number in of_pass.plan.crossing

    def parts(self) -> Iterator[Part]:
        """See `PassCache.parts`."""
        for part in self.of_pass.parts:
            with self.of_pass.bank.using_part(part.start, part.stop):
                yield part

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> PassMask | None:
        if not isinstance(self._spec, LayerSpec):
            return None
        return None if self._spec.latent else PassMask(self.number, window_size or self._spec.window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Returns keys and values, [N, kv_heads, 1, head_dim], unchanged, because attention gets them."""
        if isinstance(self._spec, LayerSpec) and self._spec.latent:
            self.of_pass.own_latent(keys, values)
            values = mx.eye(values.shape[-1], dtype=values.dtype)[None, None]
        self.keys, self.values = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """What `update_and_fetch` has returned, for a layer that shares it."""
        return self.keys, self.values

    @property
    def held(self) -> list[mx.array | None]:
        """What one layer leaves here for another."""
        return [self.keys, self.values] if self._crosses else []

    def hold(self, arrays: Sequence[mx.array | None]) -> None:
        """Takes what `held` of another such cache has given."""
        self.keys, self.values = arrays or (None, None)


class RowsOfBranch(Part):
    """The packed rows of one part of a pass. `above`: the part with the tokens before theirs."""

    kind = InPart.LEARNED

    def __init__(self, of_pass: LearnedPass, packed: PackedPart, number: int, above: RowsOfBranch | None) -> None:
        super().__init__(packed.start, packed.stop, packed.rows, packed.offset)
        self._pass, self._number = of_pass, number
        self._plan, self._bank, self._segment = of_pass.plan, of_pass.bank, max(1, of_pass.segment // packed.rows)
        self._above, self._width = above, packed.width
        self._caches: dict[int, Any] = {}
        self._masks: dict[int | None, mx.array] = {}

    def rows_of(self, tokens: mx.array) -> mx.array:
        """See `Part.rows_of`."""
        return self._pass.split(tokens)[self._number].reshape(self.rows, -1, *tokens.shape[2:])

    def run(
        self, mixer: nn.Module, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], positions: mx.array
    ) -> Any:
        """See `Part.run`."""
        size = self._segment
        states = [isinstance(each, ArraysCache) for each in caches_in(self.of([*args, *kwargs.values()], positions))]
        if self._width <= size or not states or not all(states):
            return super().run(mixer, call, args, kwargs, positions)
        outputs, cuts = [], dict[int, list[mx.array]]()
        for first in range(0, self._width, size):
            segment = _Segment(self, first, size, cuts)
            own, named = segment.of(args, positions), segment.of(kwargs, positions)
            with answered_by(self.kind):
                outputs.append(computed_again(self._bank, mixer, call, own, named))
        return joined(outputs, partial(mx.concatenate, axis=1))

    def cache(self, number: int) -> Any:
        """See `Part.cache`. Several mixers may use the arrays of a state, each some of them: those that are not set yet
        are those after the part above."""
        spec = self._plan.layout.layers[number]
        above = self._above.cache(number) if self._above is not None else None
        if number not in self._caches:
            arrays = len(spec.shapes) if isinstance(spec, RecurrentSpec) else 0
            self._caches[number] = ArraysCache(arrays) if arrays else RowsCache(self, number, above)
        states = self._caches[number]
        if isinstance(states, ArraysCache) and above is not None:
            for index, array in enumerate(above.cache):
                if states.cache[index] is None and array is not None:
                    states[index] = mx.broadcast_to(array, (self.rows, *array.shape[1:]))
        return states

    def finish(self) -> None:
        """Drops the caches, which hold the part too."""
        self._caches.clear()

    def mask(self, mask: PassMask) -> mx.array | None:
        """See `Part.mask`: [T, offset + T]. Padding is seen by padding only."""
        if isinstance(self._plan.layout.layers[mask.number], RecurrentSpec):
            return None
        if mask.window not in self._masks:
            assert isinstance(self.offset, int)
            self._masks[mask.window] = causal(self.offset, self._width, mask.window)
        return self._masks[mask.window]


class _Segment(Part):
    """The next `size` tokens from `first` on of each row of a part. `cuts`: the rows of packed arrays in segments, by
    the ids of the arrays, which are cut once: the gradient of each slice alone would be as large as the array."""

    def __init__(self, part: RowsOfBranch, first: int, size: int, cuts: dict[int, list[mx.array]]) -> None:
        assert isinstance(part.offset, int)
        super().__init__(part.start, part.stop, part.rows, part.offset + first)
        self._part, self._number, self._size, self._cuts = part, first // size, size, cuts

    def cache(self, number: int) -> Any:
        """See `Part.cache`: each segment goes on from the state that the one before it has left there."""
        return self._part.cache(number)

    def mask(self, mask: PassMask) -> mx.array | None:
        """See `Part.mask`."""
        return self._part.mask(mask)

    def rows_of(self, tokens: mx.array) -> mx.array:
        """See `Part.rows_of`."""
        if id(tokens) not in self._cuts:
            rows = self._part.rows_of(tokens)
            self._cuts[id(tokens)] = list(mx.split(rows, range(self._size, rows.shape[1], self._size), axis=1))
        return self._cuts[id(tokens)][self._number]


class RowsCache:
    """The keys and values of a part's rows, as mlx-lm's caches give them. `above`: those of the part above."""

    start_position = 0
    keys: Any = None
    values: Any = None

    def __init__(self, part: RowsOfBranch, number: int, above: RowsCache | None) -> None:
        self.offset = part.offset
        self._part, self._number = part, number
        self._above = (None, None) if above is None else (above.keys, above.values)

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        spec = self._part._plan.layout.layers[self._number]
        assert isinstance(spec, LayerSpec)
        return self._part.mask(PassMask(self._number, window_size or spec.window))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Returns all keys and values of the rows, the new ones last."""
        assert isinstance(self.offset, int)
        self.offset += keys.shape[2]
        self.keys, self.values = (
            new if old is None else mx.concatenate([mx.broadcast_to(old, (len(new), *old.shape[1:])), new], axis=2)
            for old, new in zip(self._above, (keys, values), strict=True)
        )
        return self.keys, self.values

    def keys_and_values(self) -> tuple[Any, Any]:
        return self.keys, self.values

    def maybe_trim_front(self) -> None:
        """Does nothing: a mask hides what a chunk does not see."""

    @property
    def held(self) -> list[mx.array | None]:
        """All arrays."""
        return [*self._above, self.keys, self.values]

    def hold(self, arrays: Sequence[mx.array | None]) -> None:
        """Takes what `held` of another such cache has given."""
        self._above, (self.keys, self.values) = (arrays[0], arrays[1]), arrays[2:]


LayerCaches = list[LearnedCache | RowsCache | ArraysCache]


def caches_in(values: Iterable[Any]) -> LayerCaches:
    """The caches among the arguments of a layer."""
    found: LayerCaches = []
    for value in values:
        if isinstance(value, CacheList):
            found += caches_in(value.caches)
        elif isinstance(value, LearnedCache | RowsCache | ArraysCache):
            found.append(value)
    return found


def arrays_of(caches: LayerCaches) -> list[list[mx.array | None]]:
    """What a layer gets from each cache, or leaves there."""
    return [list(each.cache) if isinstance(each, ArraysCache) else each.held for each in caches]


def put_arrays(caches: LayerCaches, arrays: Sequence[Sequence[mx.array | None]]) -> None:
    """Lets caches have what `arrays_of` others has given."""
    for cache, of_cache in zip(caches, arrays, strict=True):
        if isinstance(cache, ArraysCache):
            cache.cache = list(of_cache)
        else:
            cache.hold(of_cache)


def again_with(again: LearnedPass | None, caches: LayerCaches, arguments: Any) -> tuple[LayerCaches, Any]:
    """Other caches in place of these, those of a pass that runs again, or copies; and a layer's arguments with them."""
    fresh = {
        id(each): again.caches[each.number] if again is not None and isinstance(each, LearnedCache) else copy(each)
        for each in caches
    }

    return list(fresh.values()), _with(arguments, fresh)


def _with(value: Any, fresh: Mapping[int, Any]) -> Any:
    """The same nesting, with other caches by the ids of those in it."""
    if isinstance(value, CacheList):
        return CacheList(*(_with(each, fresh) for each in value.caches))
    if isinstance(value, dict):
        return {name: _with(each, fresh) for name, each in value.items()}
    return tuple(_with(each, fresh) for each in value) if type(value) is tuple else fresh.get(id(value), value)


# -- computing again -----------------------------------------------------------------------------


def computed_again(bank: AdapterBank, module: nn.Module, call: Call, args: Sequence[Any], kwargs: Any) -> Any:
    """What `call` gives, which the backward pass computes again instead of keeping what its gradient needs.

    A function that is computed again gives gradients only to its arguments, so the factors of the module's linears are
    arguments, and all arrays that it gets, also those that its caches have from other layers. It runs again when the
    pass and the context of the forward pass are gone, so it sets up its own.
    """
    context = bank.context
    if not isinstance(context, TrainingContext):
        return call(*args, **kwargs)
    caches, asked = caches_in([*args, *kwargs.values()]), answering()
    given, with_given = floats_of((args, kwargs, arrays_of(caches)))
    nesting: list[Callable[[Sequence[mx.array]], Any]] = []

    def run(arguments: tuple[list[Params], list[mx.array]], x: mx.array) -> list[mx.array]:
        params, others = arguments
        args, kwargs, arrays = with_given([x, *others])
        again = asked.again() if isinstance(asked, LearnedPass) else None
        fresh, (args, kwargs) = again_with(again, caches, (args, kwargs))
        put_arrays(fresh, arrays)
        with bank.using(context.with_params(params)), answered_by(again or asked):
            output = call(*args, **kwargs)
        outputs, with_outputs = floats_of((output, arrays_of(fresh)))
        if not nesting:  # else arrays of the backward pass would stay
            nesting.append(with_outputs)
        if again is not None:
            again.finish()
        return outputs

    outputs = recomputed(run)((context.of_paths(adapted_paths(module)), given[1:]), given[0])
    output, arrays = nesting[0](outputs)
    put_arrays(caches, arrays)
    return output
