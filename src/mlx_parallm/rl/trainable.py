"""The served model as the trainer sees it: the same weights, in forwards that have gradients and keep little.

    N tokens of prompts and their continuations ──trunk──▶ hidden [N, D]
    n trained positions ──head──▶ logits [n, V]

mlx-lm's models run from tokens to logits in one call. `trunk` and `head` are shallow copies of two of its modules:
they share every submodule and every array with the model, and differ in one attribute each, so serving sees no change.
The trunk's layers can be checkpointed; the head takes hidden states where the model would compute them.

As in packed prefill, to the model the tokens are a batch of single ones, each at its own offset; only attention knows
how they lie. So a prompt is computed once for all its continuations, whatever the model's file does elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.bank import AdapterBank, LinearGroup
from mlx_parallm.adapters.layout import AdapterLayout
from mlx_parallm.batch.attention import additive, attention
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.adapted import AdaptedLinear
from mlx_parallm.model.attention import AttentionStyle

Params = Mapping[str, Mapping[str, mx.array]]
"""LoRA factors by the path of their linear: {"a": [in, rank], "b": [rank, out]}, float32."""


class TrainableModel:
    """Device thread only.

    Args:
        model: with the adapted linears of `bank` in their places.
        style: who computes the model's attention, of `install_hook`.
        checkpoint_layers: recompute each layer in the backward pass instead of keeping its activations.

    Raises:
        UnsupportedModelError: the model attends by its own code, or is not made of a trunk with layers and a head.
    """

    def __init__(self, model: nn.Module, bank: AdapterBank, style: AttentionStyle, checkpoint_layers: bool) -> None:
        owner = getattr(model, "language_model", model)
        trunk = getattr(owner, "model", None)
        if style is not AttentionStyle.HOOKED or not isinstance(getattr(trunk, "layers", None), list):
            raise UnsupportedModelError(
                f"{type(model).__module__} can be served and not trained: its attention or its layers are out of reach"
            )
        assert isinstance(trunk, nn.Module)
        self.bank = bank
        self._trunk = copy.copy(trunk)
        self._trunk.layers = [_Layer(layer, bank, checkpoint_layers) for layer in trunk.layers]
        self._head = copy.copy(owner)
        self._head.model = _Given(trunk)

    @property
    def layout(self) -> AdapterLayout:
        """Of the linears that may be trained."""
        return self.bank.layout

    def hidden(self, tokens: mx.array, lies: Sequence[Lie], params: Params | None, scale: float) -> mx.array:
        """Hidden states [N, D] of tokens int [N], which lie as `lies` say, under these factors; None: the base's."""
        stream = _Stream(tuple(lies), mx.array([at for lie in lies for at in lie.positions()], mx.int32))
        with self.bank.using(None if params is None else TrainingContext(params, scale)):
            hidden: mx.array = self._trunk(tokens[:, None], cache=[stream] * len(self._trunk.layers))
        return hidden[:, 0]

    def logits(self, hidden: mx.array) -> mx.array:
        """[n, D] → [n, V], in the model's dtype."""
        logits: mx.array = self._head(hidden[None])
        return logits[0]


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """Stands where a `ForwardContext` stands in serving: every token uses `params`, in float32, with gradients."""

    params: Params
    scale: float

    def adapt(self, _group: LinearGroup, path: str, x: mx.array, y: mx.array) -> mx.array:
        """y + scale · (x a) b, x [B, T, in] and y [B, T, out] of the linear at `path`."""
        pair = self.params.get(path)
        if pair is None:
            return y
        change = (x.astype(mx.float32) @ pair["a"]) @ pair["b"]
        return y + (self.scale * change).astype(y.dtype)


@dataclass(frozen=True, slots=True)
class Lie:
    """A prompt of `prompt` tokens, then `rows` continuations of it, `width` tokens each, one after the other."""

    prompt: int
    rows: int
    width: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.rows * self.width

    def positions(self) -> Iterator[int]:
        """In its own sequence, of each token."""
        yield from range(self.prompt)
        for _ in range(self.rows):
            yield from range(self.prompt, self.prompt + self.width)


@dataclass(frozen=True, slots=True)
class _Window:
    """Stands for an attention mask: the model asked for a sliding window of so many keys, or for all."""

    size: int | None


@dataclass(frozen=True, slots=True)
class _Stream:
    """Stands for every layer's cache while the trunk runs. `offset`: the tokens' positions, int32 [N]."""

    lies: tuple[Lie, ...]
    offset: mx.array

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> _Window:
        return _Window(window_size)


class _Layer:
    """A layer of the trunk; all else that the trunk asks of it is the layer's own.

    `mx.checkpoint` gives gradients to a function's arguments only, so the layer's factors are passed to it. It runs
    the function again in the backward pass, when the forward that made the context is long over.
    """

    def __init__(self, layer: nn.Module, bank: AdapterBank, checkpointed: bool) -> None:
        self._layer = layer
        self._bank = bank
        self._checkpointed = checkpointed
        self._paths = frozenset(_paths(layer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """[N, 1, D] → [N, 1, D]."""
        context = self._bank.context
        if not self._checkpointed or not isinstance(context, TrainingContext):
            return self._run(hidden, args, kwargs)

        def run(params: Params, x: mx.array) -> mx.array:
            with self._bank.using(TrainingContext(params, context.scale)):
                return self._run(x, args, kwargs)

        checkpointed: Callable[[Params, mx.array], mx.array] = mx.checkpoint(run)
        return checkpointed({path: context.params[path] for path in self._paths & context.params.keys()}, hidden)

    def _run(self, hidden: mx.array, args: tuple[Any, ...], kwargs: dict[str, Any]) -> mx.array:
        """The layer itself. Its cache lives in this call only: the backward pass makes its own."""

        def real(value: Any) -> Any:
            return _Cache(value) if isinstance(value, _Stream) else value

        return cast(mx.array, self._layer(hidden, *map(real, args), **{name: real(v) for name, v in kwargs.items()}))


class _Cache:
    """One layer's keys and values in one forward, and its attention over them."""

    def __init__(self, stream: _Stream) -> None:
        self.offset = stream.offset
        self._lies = stream.lies

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """[N, kv_heads, 1, head_dim], handed back as they came: `attend` has them."""
        self._keys, self._values = keys, values
        return keys, values

    def attend(self, queries: mx.array, scale: float, mask: _Window, sinks: mx.array | None) -> mx.array:
        """[N, heads, 1, head_dim] → the same: a prompt looks at itself, a continuation at its prompt and itself."""
        starts = accumulate((lie.tokens for lie in self._lies), initial=0)
        parts = [
            part
            for lie, start in zip(self._lies, starts, strict=False)
            for part in self._attend_one(lie, start, queries, scale, mask.size, sinks)
        ]
        return mx.concatenate(parts)

    def _attend_one(
        self, lie: Lie, start: int, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> Iterator[mx.array]:
        middle, stop = start + lie.prompt, start + lie.tokens
        keys, values = _rows(self._keys[start:middle], 1), _rows(self._values[start:middle], 1)
        prompt = _rows(queries[start:middle], 1)
        yield _tokens(attention(prompt, keys, values, scale, _mask(0, lie.prompt, window, prompt.dtype), sinks))
        if not lie.width:
            return
        own_keys, own_values = (_rows(each[middle:stop], lie.rows) for each in (self._keys, self._values))
        mask = _mask(lie.prompt, lie.width, window, queries.dtype)
        rest = _rows(queries[middle:stop], lie.rows)
        yield _tokens(attention(rest, _after(keys, own_keys), _after(values, own_values), scale, mask, sinks))


def _rows(tokens: mx.array, rows: int) -> mx.array:
    """[rows · T, heads, 1, head_dim], single tokens → [rows, heads, T, head_dim]."""
    _, heads, _, width = tokens.shape
    return tokens.reshape(rows, -1, heads, width).swapaxes(1, 2)


def _tokens(rows: mx.array) -> mx.array:
    """The way back."""
    _, heads, _, width = rows.shape
    return rows.swapaxes(1, 2).reshape(-1, heads, 1, width)


def _after(prompt: mx.array, own: mx.array) -> mx.array:
    """[1, heads, P, head_dim] before each row of [G, heads, T, head_dim]."""
    return mx.concatenate([mx.broadcast_to(prompt, (own.shape[0], *prompt.shape[1:])), own], axis=2)


def _mask(offset: int, tokens: int, window: int | None, dtype: mx.Dtype) -> mx.array:
    """Additive [T, offset + T]: the token at offset + i looks at none after itself, and no farther than its window."""
    queries = mx.arange(offset, offset + tokens)[:, None]
    keys = mx.arange(offset + tokens)[None]
    seen = keys <= queries
    return additive(seen if window is None else seen & (keys > queries - window), dtype)


class _Given:
    """Stands in the place of the trunk in a head: what the head passes to it is its answer already."""

    def __init__(self, trunk: nn.Module) -> None:
        self._trunk = trunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)

    def __call__(self, hidden: mx.array, *_args: Any, **_kwargs: Any) -> mx.array:
        return hidden


def _paths(layer: nn.Module) -> Iterator[str]:
    """Of the layer's adapted linears, in the whole model."""
    return (part.path for _, part in layer.named_modules() if isinstance(part, AdaptedLinear))
