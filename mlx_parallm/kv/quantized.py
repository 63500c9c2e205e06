"""How keys and values are quantized: 8 or 4 bits for each number, with a scale and a bias for each group of them.

    numbers [..., head_dim]      one head's keys or values of one token
    words   [..., w] uint32      | numbers: head_dim * bits / 32 | scale and bias of each group: 2 x 16 bits |

One array holds all of it, so a block of words is copied, moved and saved as a block of numbers is.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.model.layer_state import group_size


def pack(numbers: mx.array, bits: int) -> mx.array:
    """Quantizes vectors [..., head_dim] to words uint32 [..., w]."""
    kind = _kind_of_scales(numbers.dtype)
    codes, scales, biases = mx.quantize(numbers, group_size(numbers.shape[-1]), bits)
    pairs = mx.stack([scales.astype(kind), biases.astype(kind)], axis=-1).flatten(-2)
    return mx.concatenate([codes, pairs.view(mx.uint32)], axis=-1)


def unpack(words: mx.array, bits: int, size: int, dtype: mx.Dtype) -> mx.array:
    """The vectors [..., size] of a type, from words as `pack` returns them."""
    codes = size * bits // 32
    pairs = words[..., codes:].view(_kind_of_scales(dtype)).astype(dtype)
    return mx.dequantize(words[..., :codes], pairs[..., ::2], pairs[..., 1::2], group_size(size), bits)


def _kind_of_scales(dtype: mx.Dtype) -> mx.Dtype:
    """The type of scales and biases: that of the numbers, but 16 bits wide."""
    return mx.float16 if dtype == mx.float32 else dtype
