"""What is told of forgetting: what would be done, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlx_parallm.core.json_values import ANSWER


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """What of one adapter is, or would be, forgotten."""

    __pydantic_config__ = ANSWER

    adapter: str
    """The adapter."""
    trajectories: int
    """Its collected trajectories that are removed; of an episode, each turn is one."""
    updates: int = 0
    """Updates that have learnt from what is forgotten, with what was given with them. 0: the adapter stays as it is."""
    again: int = 0
    """Updates that are made again, from the first of these on."""
    unknown: int = 0
    """Older updates of which the journal does not know any more whether they have learnt from it, so they stay as they
    are."""
    starts_from: str = ""
    """The checkpoint, or the version, from which they are made; `a new adapter`; or empty."""
    seconds: float = 0.0
    """How long they took when they were first made."""
    removed: tuple[str, ...] = ()
    """Checkpoints that have learnt from it and are removed."""
    kept: tuple[str, ...] = ()
    """Checkpoints that have learnt from it and stay, by `checkpointing.remove_forgotten`."""
    log_lines: int = 0
    """Lines of the trajectory log that are removed."""
    problem: str = ""
    """Why the adapter cannot be built anew; empty if it can."""


@dataclass(frozen=True, slots=True)
class ForgetPlan:
    """What would be forgotten. Nothing was changed."""

    __pydantic_config__ = ANSWER

    what: str
    """What is to be forgotten, in words."""
    adapters: tuple[AdapterPart, ...]
    """By adapter; empty if nothing is kept of it."""
    remove_checkpoints: str
    """`checkpointing.remove_forgotten`: which checkpoints that have learnt from it go."""


@dataclass(frozen=True, slots=True)
class ForgetCard:
    """What is being forgotten, or was last since the server started."""

    __pydantic_config__ = ANSWER

    state: Literal["none", "rebuilding", "removing", "done", "held", "failed"] = "none"
    """`rebuilding`: updates are made again. `removing`: the rebuilt version is live. `held`: an adapter's evaluation
    is below the floor, so it stays as it is. `failed`: it is tried again when the server starts, or when something is
    to be forgotten."""
    what: str = ""
    """What is forgotten, in words."""
    adapter: str = ""
    """The adapter that is being worked on."""
    done: int = 0
    """Updates of it that were looked at."""
    updates: int = 0
    """Those that there are to look at."""
    reason: str = ""
    """Why it was held or has failed, by adapter."""
