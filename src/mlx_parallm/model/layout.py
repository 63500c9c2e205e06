"""The shape of a row in the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.model.layers import LayerSpec


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All attention layers of a model, and the dtype its keys and values have."""

    layers: tuple[LayerSpec, ...]
    dtype: mx.Dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return sum(s.kv_heads * (s.head_dim_k + s.head_dim_v) for s in self.layers) * self.dtype.size
