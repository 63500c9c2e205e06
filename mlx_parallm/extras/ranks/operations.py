"""What rank 0 of a model that is split over several machines does to its arrays, as plain data.

The other ranks hold the other parts of the same arrays, and repeat these operations on them in the same order. They
need no requests, no scheduler and no prefix cache for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlx_parallm.batch.attention import AttentionChoice
from mlx_parallm.train.branches import Branch


@dataclass(frozen=True, slots=True)
class RowTokens:
    """The tokens of one row in a forward pass.

    tables: the row's blocks, as `KVRow` has them. slot: of its adapter. start: tokens computed before. tokens:
    how many the pass computes.
    """

    tables: list[list[int]]
    slot: int
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One call of the model. `ids`: the input tokens of all rows, in order. `attention`: of rank 0."""

    ids: list[int]
    rows: list[RowTokens]
    attention: AttentionChoice
    kind: Literal["forward pass"] = "forward pass"


@dataclass(frozen=True, slots=True)
class ResizeArena:
    """`Arena.resize`. `store`: the number of the arena in `LoRABatchedKVCache.stores`."""

    store: int
    blocks: int
    most_bytes: float
    kind: Literal["resize arena"] = "resize arena"


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """`Arena.copy`. `store`: as in `ResizeArena`."""

    store: int
    sources: list[int]
    targets: list[int]
    kind: Literal["copy blocks"] = "copy blocks"


@dataclass(frozen=True, slots=True)
class ClearPool:
    """`LoRABatchedKVCache.clear`: drops all keys and values."""

    kind: Literal["clear pool"] = "clear pool"


@dataclass(frozen=True, slots=True)
class FitSlots:
    """`LinearGroup.fit`."""

    group: str
    slots: int
    paths: list[str]
    rank: int
    kind: Literal["fit slots"] = "fit slots"


@dataclass(frozen=True, slots=True)
class WriteSlot:
    """`LinearGroup.write`. `factors`: the whole factors in the safetensors format, as `PATH.a` and `PATH.b`, in
    base64. `scales`: by path."""

    group: str
    slot: int
    factors: str
    scales: dict[str, float]
    kind: Literal["write slot"] = "write slot"


@dataclass(frozen=True, slots=True)
class ReadSlot:
    """`LinearGroup.read`, to which every rank contributes its part."""

    group: str
    slot: int
    ranks: dict[str, int]
    kind: Literal["read slot"] = "read slot"


@dataclass(frozen=True, slots=True)
class ClearGroup:
    """`LinearGroup.clear`."""

    group: str
    kind: Literal["clear group"] = "clear group"


@dataclass(frozen=True, slots=True)
class TrainedSpan:
    """Consecutive tokens of a training pass that use the same factors. `ranks`: of the factors, by the path of their
    linear. The values are not in here: they travel by sums over the ranks."""

    tokens: int
    scale: float
    ranks: dict[str, int]


@dataclass(frozen=True, slots=True)
class TrainingPass:
    """Begins a pass through the trunk for training: `TrainableModel.trunk`. Nothing is computed yet but the sums that
    give each rank the factors.

    number: names the pass. tokens, branches, spans, learns: the arguments; no spans: the base model.
    recomputed: whether the backward pass computes each layer again.
    dropped: earlier passes that will not be computed to their end.
    """

    number: int
    tokens: list[int]
    branches: list[Branch]
    spans: list[TrainedSpan]
    learns: bool
    recomputed: bool
    dropped: list[int]
    kind: Literal["training pass"] = "training pass"


@dataclass(frozen=True, slots=True)
class TrainingStage:
    """Computes the next stage of a training pass: the output of a layer or, in the backward pass, the gradients of its
    factors."""

    number: int
    kind: Literal["training stage"] = "training stage"


@dataclass(frozen=True, slots=True)
class Stop:
    """Rank 0 has ended as it should; the others end too."""

    kind: Literal["stop"] = "stop"


Operation = (
    ForwardPass
    | ResizeArena
    | CopyBlocks
    | ClearPool
    | FitSlots
    | WriteSlot
    | ReadSlot
    | ClearGroup
    | TrainingPass
    | TrainingStage
    | Stop
)
