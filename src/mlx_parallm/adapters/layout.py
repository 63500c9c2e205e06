"""Which linears of the model an adapter may change, and why the others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One linear, [in_features] → [out_features], at `path` in the model: `model.layers.0.self_attn.q_proj`.

    Linears of one `group` are given the same input array, so their first products can be one:
    `model.layers.0.self_attn.q_proj` and its k_proj and v_proj, gate_proj and up_proj.
    """

    path: str
    in_features: int
    out_features: int
    group: str

    @property
    def target(self) -> str:
        """The last part of the path, as adapter configs name it."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """What adapters of one model look like.

    `linears`: by path, in the model's order. `refused`: paths of other modules that adapter files may name, and
    what they would be: `lm_head` → "head LoRA".
    """

    linears: Mapping[str, LinearSpec]
    refused: Mapping[str, str]
    layers: int
    """Transformer blocks, for formats that count them."""
