"""One version of an adapter: what is known of it, who holds it, and whether it can be read again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from mlx_parallm.core import AdapterRef


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """What is known of a version's content; see `core.AdapterCard`. `root` "": not from files.

    `digest` identifies the content; "" for one published in this process.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    nbytes: int
    digest: str = ""
    root: str = ""
    checkpoint: str | None = None


@dataclass(eq=False, slots=True)
class Version:
    """One version; its content never changes. `superseded`: its files hold other content by now.

    `forgotten`: no selector finds it any more. It goes on existing for those who hold it.
    `ranks`, `scales`: by path, as published; the store's, known once it has had the weights.
    """

    ref: AdapterRef
    info: VersionInfo
    created: int = field(default_factory=lambda: int(time.time()))
    leases: int = 0
    superseded: bool = False
    forgotten: bool = False
    ranks: dict[str, int] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)

    @property
    def readable(self) -> bool:
        """Whether its weights can be read again."""
        return bool(self.info.root) and not self.superseded
