"""Names of adapters and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One immutable version of one adapter. Version 0 of `base` is the model itself."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


BASE_ADAPTER = AdapterRef("base", 0)
"""The model itself, slot 0 of the bank."""


class Residence(StrEnum):
    """Where an adapter version's weights are."""

    SLOT = "slot"
    """In the bank: rows can use it now."""
    COPY = "copy"
    """Unpadded, in memory: staged again when a row wants it."""
    FILE = "file"
    """On disk only."""


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """One version of an adapter.

    `live`: the bare name means it. `root`: the directory it came from, "" for one published in this process.
    `rank` is the largest of its modules'; `alpha` is scale times rank. `targets`: its modules' last names, such
    as q_proj. `bytes`: of its weights as stored. `created`: Unix time in seconds. `leases`: requests that hold it.
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


@dataclass(frozen=True, slots=True)
class CheckpointCard:
    """One checkpoint on disk: `name` is `checkpoint-<step>`; `latest` is the tag of the newest save,
    or of the one that was gone back to since.

    `rank`, `alpha`, `targets`, `bytes`: as an AdapterCard's.
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


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """A snapshot. Counters only grow; sizes in bytes, times in seconds.

    `running` and `waiting` are names of adapters of live and of queued sequences. `swaps_total`: times that
    a name, or the route, came to mean another version. `flip_s_*` is how long a flip held the device thread,
    `stage_s_last` how long the last version took to stage beside traffic, in all.
    """

    slots: int = 0
    slots_used: int = 0
    slots_pinned: int = 0
    bank_bytes: int = 0
    copies: int = 0
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    swaps_total: int = 0
    staged_total: int = 0
    evicted_total: int = 0
    checkpoint_saves_total: int = 0
    flip_s_last: float = 0.0
    flip_s_max: float = 0.0
    stage_s_last: float = 0.0
