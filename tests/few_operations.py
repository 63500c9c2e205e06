"""A model with few operations in a step, and how far steps raise the peak of MLX's memory.

MLX writes into an array in place only if nothing else holds it, and what is in flight holds its inputs. A step of many
operations hides that, because MLX waits when too many operations are in flight: about 50 on the CPU backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

from mlx_parallm.model.device import prepare_device

HEADS, HEAD_DIM, VOCAB_SIZE = 2, 1024, 64


class _Attention(nn.Module):
    """Attention without projections and positions, which takes some milliseconds, however few tokens there are."""

    def __init__(self) -> None:
        super().__init__()
        noise = mx.random.normal((300, 300), key=mx.random.key(1))
        self.busy = noise + noise.T

    def __call__(self, x: mx.array, cache: Any, mask: Any) -> mx.array:
        heads = x.reshape(*x.shape[:2], HEADS, HEAD_DIM).transpose(0, 2, 1, 3)
        heads = heads + 0 * mx.linalg.eigvalsh(self.busy, stream=mx.cpu)[0]
        keys, values = cache.update_and_fetch(heads, heads)
        out = scaled_dot_product_attention(heads, keys, values, cache=cache, scale=0.05, mask=mask)
        return x + out.transpose(0, 2, 1, 3).reshape(x.shape)


class _Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, HEADS * HEAD_DIM)
        self.layers = [_Attention()]

    def __call__(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        x = self.embed_tokens(inputs)
        return self.layers[0](x, cache[0], create_attention_mask(x, cache[0]))


class FewOperations(nn.Module):
    """One layer, whose keys and values take 16 KiB a token."""

    def __init__(self) -> None:
        super().__init__()
        prepare_device()
        self.model = _Trunk()
        self.lm_head = nn.Linear(HEADS * HEAD_DIM, VOCAB_SIZE, bias=False)
        shape = (VOCAB_SIZE, HEADS * HEAD_DIM)
        self.model.embed_tokens.weight = mx.random.normal(shape, key=mx.random.key(2))
        self.lm_head.weight = mx.random.normal(shape, key=mx.random.key(3)) / 10
        mx.eval(self.parameters())

    def __call__(self, inputs: mx.array, cache: Sequence[Any] = ()) -> mx.array:
        return self.lm_head(self.model(inputs, cache))

    @property
    def layers(self) -> list[nn.Module]:
        return self.model.layers


@dataclass
class Grown:
    """`nbytes`: how far the peak of MLX's memory rose above what there was before."""

    nbytes: int = 0


@contextmanager
def growth() -> Iterator[Grown]:
    """Measures how much memory the block takes at most, besides what is there before it. What it has launched may be in
    flight afterwards."""
    grown = Grown()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    yield grown
    grown.nbytes = max(0, mx.get_peak_memory() - before)  # the peak is 0 if nothing was allocated
