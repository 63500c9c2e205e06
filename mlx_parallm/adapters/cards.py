"""What is said of adapters, their versions and their checkpoints. This module does not import MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from mlx_parallm.core.adapters import BEST, AdapterRef
from mlx_parallm.core.json_values import ANSWER


class Residence(StrEnum):
    """Where the weights of an adapter version are."""

    SLOT = "slot"
    """In a slot of the bank, where rows can use them."""
    COPY = "copy"
    """In memory without padding. They are staged into a slot again when a row needs them."""
    FILE = "file"
    """On disk only."""


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """One version of an adapter.

    Attributes:
        live: whether the name without a version means this version.
        root: the directory it was loaded from; empty if it was published in this process.
        rank: the largest rank of its modules.
        alpha: scale times rank; times √rank if the adapter is rank-stabilised (rsLoRA).
        targets: the last names of its modules, such as `q_proj`.
        bytes: size of its weights as stored.
        created: Unix time in seconds.
        leases: requests under way for this version, rollouts and evaluations among them.
        checkpoint: the name of its checkpoint, if it has one.
        base: the name of its base model; empty if there is only one.
        warning: how the config of its files contradicts their tensors; empty if it does not.
    """

    ref: AdapterRef
    live: bool
    residence: Residence
    root: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    bytes: int
    created: int
    leases: int = 0
    checkpoint: str | None = None
    base: str = ""
    warning: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointCard:
    """One checkpoint on disk. `rank`, `alpha`, `targets` and `bytes` as in AdapterCard.

    Attributes:
        name: `checkpoint-<step>`.
        created: Unix time in seconds.
        tags: names given to it. `latest` is a tag of the newest checkpoint, or of the one restored since.
    """

    name: str
    adapter: AdapterRef
    step: int
    path: str
    created: int
    tags: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    rank: int = 0
    alpha: float = 0.0
    targets: tuple[str, ...] = ()
    bytes: int = 0

    def tags_beside(self, best: AdapterRef | None) -> tuple[str, ...]:
        """Its tags, without `best` if another version is the best one and not saved yet. `best`: of training; None: it
        has none, so that the tag decides."""
        return tuple(tag for tag in self.tags if tag != BEST or best in (None, self.adapter))


@dataclass(frozen=True, slots=True)
class KeptPart:
    """One part of what is kept of an adapter."""

    __pydantic_config__ = ANSWER

    what: str
    """In words."""
    path: str
    """The file or folder; empty for what is in memory."""
    count: int
    """Things that it consists of, such as files or lines."""
    bytes: int = 0
    """Bytes on the disk; 0 if it shares a file with others."""


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """A snapshot of counters and gauges. Names ending in `_total` only grow. Sizes in bytes, times in seconds.

    Attributes:
        max_rank: the largest rank of an adapter.
        running, waiting: names of the adapters of live and of queued sequences.
        route_changed: whether a rollback of the route has something to take back.
        swaps_total: how often the live version of a name, or the route, changed.
        flip_s_last, flip_s_max: how long a change of a live version blocked the device thread.
        stage_s_last: duration of the last staging, from its first unit to its last.
    """

    slots: int = 0
    max_rank: int = 0
    slots_used: int = 0
    slots_pinned: int = 0
    bank_bytes: int = 0
    copies: int = 0
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    route_changed: bool = False
    swaps_total: int = 0
    staged_total: int = 0
    evicted_total: int = 0
    checkpoint_saves_total: int = 0
    flip_s_last: float = 0.0
    flip_s_max: float = 0.0
    stage_s_last: float = 0.0
