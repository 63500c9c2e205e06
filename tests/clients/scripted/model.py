"""A model that recites a script: what it writes follows from the last state token of the text, and from the distance
to the last token that begins an answer. It is a `model_file` of a model folder: attention finds both, so keys and
values are cached, shared and evicted as those of any model are."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_attention_mask, scaled_dot_product_attention

FAR = 4.0
"""Difference of the scores of neighbouring tokens. exp(-FAR) is nothing after a few tokens."""


@dataclass
class ModelArgs(BaseModelArgs):
    """`states` and `offsets` are the shape of the script; `head_dim` that of keys, of which a few numbers are used."""

    model_type: str
    vocab_size: int
    states: int
    offsets: int
    num_hidden_layers: int = 1
    num_attention_heads: int = 2
    num_key_value_heads: int = 2
    head_dim: int = 32


class LastOf(nn.Module):
    """For each position, the last marked token before: its position (head 0: answers begin) and its state (head 1)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.width = args.head_dim

    def __call__(self, marks: mx.array, position: mx.array, values: mx.array, mask: Any, cache: Any) -> mx.array:
        """marks, values: (B, 2, L), position: (B, 1, L) → (B, 2, L); 0 where there is no such token."""
        score = mx.where(marks, FAR * position, -1000.0)
        queries, keys = self._vectors(mx.ones_like(score)), self._vectors(score)
        held = self._vectors(values, marks)
        if cache is not None:
            keys, held = cache.update_and_fetch(keys, held)
        found = scaled_dot_product_attention(queries, keys, held, cache=cache, scale=1.0, mask=mask)
        return mx.where(found[..., 1] > 0.5, mx.round(found[..., 0]), 0)

    def _vectors(self, *numbers: mx.array) -> mx.array:
        vectors = mx.stack(numbers, axis=-1).astype(mx.float32)
        return mx.pad(vectors, [(0, 0)] * 3 + [(0, self.width - len(numbers))])


class Model(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.layers = [LastOf(args)]
        self.script = mx.zeros((args.states + 1, args.offsets))
        """The next token, by state and by offset."""
        self.begins = mx.zeros((args.vocab_size,))
        """1: the token begins an answer."""
        self.sets = mx.zeros((args.vocab_size,))
        """The state that a token sets, from 1; 0: none."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        cache = cache or [None]
        offset = mx.array(0 if cache[0] is None else cache[0].offset)
        position = (mx.arange(inputs.shape[1]) + offset[..., None]).astype(mx.float32)
        position = mx.broadcast_to(position, inputs.shape)
        state = self.sets[inputs]
        marks = mx.stack([self.begins[inputs], state], axis=1) > 0
        values = mx.stack([position, state], axis=1)
        mask = create_attention_mask(marks[:, 0, :, None], cache[0])
        found = self.layers[0](marks, position[:, None], values, mask, cache[0])
        begun, last = found[:, 0], found[:, 1].astype(mx.int32)
        since = mx.clip(position - begun, 0, self.args.offsets - 1).astype(mx.int32)
        chosen = self.script[mx.clip(last, 0, self.args.states), since].astype(mx.int32)
        return 50.0 * (chosen[..., None] == mx.arange(self.args.vocab_size)).astype(mx.float32)
