"""What is said of adapters, their versions and their checkpoints. This module does not import MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from mlx_parallm.core.adapters import BEST, AdapterRef, AdapterText
from mlx_parallm.core.json_values import ANSWER, NOT_SENT, Figure, sent_as


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
    """One version of an adapter."""

    __pydantic_config__ = ANSWER

    ref: AdapterText = field(metadata=sent_as("id"))
    """`name@version`."""
    live: bool
    """Whether requests that send the name without a version get this one."""
    residence: Residence
    """`slot`: in the adapter bank. `copy`: in memory. `file`: only on disk."""
    root: str
    """The folder that it was loaded from; empty if it was published in this process, and for keys with the role
    `inference`."""
    rank: int
    """The largest rank of its modules."""
    alpha: float
    """The LoRA scale times the rank; times its square root if the adapter is rank-stabilised (rsLoRA)."""
    targets: tuple[str, ...]
    """Last names of the modules that it changes."""
    bytes: int
    """Bytes of its weights, as stored."""
    created: int
    """Unix time, seconds."""
    leases: int = 0
    """Number of requests under way that use it, rollouts and evaluations among them."""
    checkpoint: str | None = None
    """Name of its checkpoint, if it has one."""
    base: str = field(default="", metadata=sent_as("base_model_name"))
    """The base model that it is for; empty if there is only one."""
    warning: str = ""
    """How the config of its files contradicts their tensors, which are used; empty if it does not."""
    digest: str = field(default="", metadata=NOT_SENT)
    """Identifies the content of its files; empty if they were not read."""


@dataclass(frozen=True, slots=True)
class CheckpointCard:
    """An adapter version on disk."""

    __pydantic_config__ = ANSWER

    name: str
    """`checkpoint-<step>`."""
    adapter: AdapterText
    """The adapter version, as `name@version`."""
    step: int
    """The checkpoint's number."""
    path: str = field(metadata=NOT_SENT)
    """Its folder."""
    created: int
    """Unix time, seconds."""
    tags: tuple[str, ...] = ()
    """Other names for it. `latest` is one of the newest checkpoint, or of the one restored since."""
    metrics: Mapping[str, Figure] = field(default_factory=dict)
    """The numbers that were saved with it; null for a number that is not finite."""
    rank: int = field(default=0, metadata=NOT_SENT)
    """This and the fields below are as in `AdapterCard`."""
    alpha: float = field(default=0.0, metadata=NOT_SENT)
    targets: tuple[str, ...] = field(default=(), metadata=NOT_SENT)
    bytes: int = field(default=0, metadata=NOT_SENT)

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
