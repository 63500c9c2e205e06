"""What an adapter consists of: its low-rank factors, the linears that they may change, and its published versions."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.core.adapters import AdapterRef

Array = Any
"""A float array of NumPy or MLX. Files, and threads other than the device thread, use NumPy only."""


ALL_LINEAR = "all-linear"
"""PEFT's word, in `target_modules`, for all linears but the head."""


@dataclass(frozen=True, slots=True)
class HeadParts:
    """The two modules that do the work of a linear from latents to the keys and values of all attention heads.

    `keys`, `values`: their paths. Each has one matrix per head. `key_width`: of one head's keys, which come before its
    values in the linear's outputs.
    """

    keys: str
    values: str
    heads: int
    key_width: int

    def columns(self, path: str) -> slice:
        """Which of a head's outputs the module at `path` gives."""
        return slice(None, self.key_width) if path == self.keys else slice(self.key_width, None)

    def weight(self, path: str, matrix: Array) -> Array:
        """The weight of the module at `path` for the linear's matrix [latent, out]: that of keys [heads, latent,
        key_width], that of values [heads, value width, latent]."""
        part = matrix.reshape(matrix.shape[0], self.heads, -1)[..., self.columns(path)]
        return part.transpose((1, 0, 2) if path == self.keys else (1, 2, 0))


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One linear, [in_features] → [out_features], at `path` in the model, such as `model.layers.0.self_attn.q_proj`.

    Linears of one `group` get the same input x, so that x a can be computed for all of them at once (see `LoRAPair`).
    In most models q_proj, k_proj and v_proj are one group, gate_proj and up_proj another.

    `experts`: in a layer of experts, how many of them have such a linear each; 0 for any other linear. `chosen`: how
    many of these a token uses. `chooses`: whether it only chooses experts or tokens. `parts`: the modules that do its
    work if two with one matrix per head do. `embedding`: for the head of a tied model, the path of the embedding that
    does its work.
    """

    path: str
    in_features: int
    out_features: int
    group: str
    experts: int = 0
    chosen: int = 1
    chooses: bool = False
    parts: HeadParts | None = None
    embedding: str = ""

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of the modules that do its work."""
        return (self.embedding or self.path,) if self.parts is None else (self.parts.keys, self.parts.values)

    @property
    def expert_axis(self) -> tuple[int, ...]:
        """The first axis of arrays of experts; none for any other linear."""
        return (self.experts,) if self.experts else ()

    def a_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the first factor of a `LoRAPair`."""
        return (*self.expert_axis, self.in_features, rank)

    def b_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the second factor of a `LoRAPair`."""
        return (*self.expert_axis, rank, self.out_features)

    @property
    def target(self) -> str:
        """The last part of the path, as `target_modules` of adapter configs names it."""
        return self.path.rpartition(".")[2]


_OUTSIDE = frozenset({"model", "language_model", "backbone", "transformer", "gpt_neox"})
"""Names of modules that have the layers and the head of a model's text part."""
_LEFT_OUT = frozenset({"forget_gate"})
_SYNONYMS = {"h": "layers", "shared_experts": "shared_expert"}
"""Other parts of paths that mlx-lm and versions of Transformers spell differently, or leave out."""


def plain_path(path: str) -> str:
    """A path in the text part of a model without what programs spell differently: `layers.0.mlp.up_proj` for
    language_model.model.layers.0.mlp.up_proj, model.language_model.layers.0.mlp.up_proj and model.layers.0.mlp.up_proj.
    """
    parts = path.split(".")
    while len(parts) > 1 and parts[0] in _OUTSIDE:
        del parts[0]
    return ".".join(_SYNONYMS.get(part, part) for part in parts if part not in _LEFT_OUT)


@dataclass(frozen=True)
class AdapterLayout:
    """Which linears of a model an adapter may change.

    `linears`: those of the transformer blocks, by path, in the model's order. `refused`: modules that adapter files may
    name but that cannot be adapted, as path → name of the unsupported feature, such as `model.embed_tokens` →
    "embedding LoRA". `layers`: number of transformer blocks. `head`: the linear from hidden states to logits, None if
    it cannot be adapted. In a tied model its target is `lm_head`. `source`: where the model was read from, if it was.
    `transformers`: for linears that have another path in Transformers, that path, by their own. Two have the same if
    their outputs, one after the other, are those of one linear there.
    """

    linears: Mapping[str, LinearSpec]
    refused: Mapping[str, str]
    layers: int
    head: LinearSpec | None = None
    source: Path | None = None
    transformers: Mapping[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[LinearSpec]:
        """All linears that an adapter may change, the head last."""
        yield from self.linears.values()
        if self.head is not None:
            yield self.head

    @property
    def hidden(self) -> int:
        """The width of the hidden states, which most linears of a block read."""
        ((width, _),) = Counter(spec.in_features for spec in self.linears.values()).most_common(1)
        return width

    def named(self, names: Collection[str]) -> list[LinearSpec]:
        """The linears with these last names. `ALL_LINEAR` stands for those of all layers that do more than choose
        experts or tokens."""
        every = ALL_LINEAR in names
        return [s for s in self if s.target in names or (every and s is not self.head and not s.chooses)]

    def find(self, path: str) -> LinearSpec | None:
        """The linear at a path."""
        if self.head is not None and path == self.head.path:
            return self.head
        return self.linears.get(path)

    def spelled(self, path: str) -> Sequence[LinearSpec]:
        """The linears that a path means in any of the spellings in use; several if they are one in Transformers."""
        return self._spelled.get(plain_path(path), ())

    def refusal(self, path: str) -> str:
        """Why a path, in any spelling, names no linear that adapters may change; "" if that is not known."""
        return self._refusals.get(plain_path(path), "")

    @cached_property
    def _spelled(self) -> dict[str, list[LinearSpec]]:
        specs = {plain_path(spec.path): [spec] for spec in self}
        joined: dict[str, list[LinearSpec]] = {}
        for path, name in self.transformers.items():
            joined.setdefault(plain_path(name), []).extend(filter(None, [self.find(path)]))
        return specs | joined

    @cached_property
    def _refusals(self) -> dict[str, str]:
        return {plain_path(path): reason for path, reason in self.refused.items()}


def lora_scale(alpha: float, rank: int, rslora: bool = False) -> float:
    """The factor of an adapter's product: alpha / rank. Rank-stabilised LoRA (arXiv 2312.03732): alpha / √rank."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def lora_alpha(scale: float, rank: int, rslora: bool = False) -> float:
    """The alpha that gives this scale. It is a whole number if it is one apart from rounding."""
    alpha = scale * (math.sqrt(rank) if rslora else rank)
    return float(round(alpha)) if math.isclose(alpha, round(alpha), rel_tol=1e-14) else alpha


@dataclass(frozen=True, slots=True)
class LoRAPair:
    """The two factors of one linear's adapter (LoRA, arXiv 2106.09685).

    y = x W + scale · (x a) b with a [in, rank] and b [rank, out]. `lora_scale` gives the scale. Experts have a pair
    each, all of the same rank: a is [experts, in, rank] and b [experts, rank, out].
    """

    a: Array
    b: Array
    scale: float

    @property
    def rank(self) -> int:
        return int(self.a.shape[-1])


@dataclass(frozen=True)
class AdapterWeights:
    """The pairs of one adapter, by the path of their linear. Their ranks and scales may differ.

    `rslora`: whether their scales are alpha / √rank. It decides what `alpha` is, and changes no output.
    """

    pairs: Mapping[str, LoRAPair]
    rslora: bool = False

    @cached_property
    def rank(self) -> int:
        """The largest rank of a pair."""
        return max(pair.rank for pair in self.pairs.values())

    @cached_property
    def alpha(self) -> float:
        """The largest alpha of a pair."""
        return max(lora_alpha(pair.scale, pair.rank, self.rslora) for pair in self.pairs.values())

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """The last parts of the paths, sorted."""
        return tuple(sorted({path.rpartition(".")[2] for path in self.pairs}))

    @property
    def nbytes(self) -> int:
        return sum(int(pair.a.nbytes + pair.b.nbytes) for pair in self.pairs.values())


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """Facts about the content of a version; see `cards.AdapterCard`.

    `nbytes`: of the factors as stored. `root`: the directory of its files, "" if it has none. `digest`: identifies the
    content of the files, "" if they have not been read. `checkpoint`: the checkpoint's name if `root` is one.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    nbytes: int
    digest: str = ""
    root: str = ""
    checkpoint: str | None = None
    warning: str = ""

    @classmethod
    def of(cls, weights: AdapterWeights) -> VersionInfo:
        """The facts about weights that are in no file."""
        return cls(weights.rank, weights.alpha, weights.targets, weights.nbytes)

    @classmethod
    def of_checkpoint(cls, card: CheckpointCard) -> VersionInfo:
        """The facts about a checkpoint's version, whose files have not been read."""
        return cls(card.rank, card.alpha, card.targets, card.bytes, "", card.path, card.name)


@dataclass(eq=False, slots=True)
class Version:
    """One version of an adapter. Its weights never change. Only the registry writes this record;
    `residency.Resident` records where the weights are.

    Attributes:
        leases: number of requests and other users of it; it is not deleted while there are any.
        superseded: the files it came from hold other content now.
        forgotten: no selector finds it any more. It exists until its last lease ends.
        numbered: a client chose its number, so it is found by it until it is unloaded.
    """

    ref: AdapterRef
    info: VersionInfo
    created: int = field(default_factory=lambda: int(time.time()))
    leases: int = 0
    superseded: bool = False
    forgotten: bool = False
    numbered: bool = False

    @property
    def readable(self) -> bool:
        """Whether its weights can be read from its files again."""
        return bool(self.info.root) and not self.superseded
