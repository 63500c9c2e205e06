"""What training reports while it runs: events, and figures that have diverged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_parallm.core.readers import Reader


@dataclass(frozen=True, slots=True)
class Divergence:
    """A figure of training that is beyond its limit.

    Attributes:
        signal: not_finite, kl_step, ratio, kl, entropy, length or reward: the keys of `rl_training.divergence`.
        value: the figure; NaN if it is not a number.
        limit: the configured one; None for not_finite.
        action: what is done: tell, hold, pause or roll_back.
        reason: the same in words.
        at: Unix time in seconds.
    """

    signal: str
    value: float
    limit: float | None
    action: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class TrainingEvent:
    """One entry of the event stream. `at`: Unix time in seconds.

    `kind` is collected, closed (a group that requests have named), scored, dropped, updating (an update begins),
    update, held, skipped, evaluation, evaluation_failed, divergence, plateau (nearly all answers earn the same part of
    the reward), plateau_ended, rollback, comparison_started, comparison_ended, lesson_started, lesson_ended,
    checkpoint, averaged (an average of adapters was made), paused, resumed, started, stopped, placeholder_logprobs
    (the log-probabilities of samples are all 0; once for each adapter and start), or events_lost. The last one replaces
    events that a listener has missed; `data["events"]` is their number, or None if that is not known. `id`: by which a
    listener that comes back names the last event it has had; empty for events_lost.
    """

    kind: str
    at: float
    data: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    def seen_by(self, reader: Reader) -> TrainingEvent | None:
        """The event without what is unknown to a reader; None: all of it is. Events without an adapter are shown to
        every reader. Only one that reads all sees `key`, the owner of a group, and `groups`, which several keys own."""
        if reader.reads_all:
            return self
        named = [*self.data.get("adapters", ()), *filter(None, [self.data.get("adapter")])]
        if not all(reader.sees(str(name).partition("@")[0]) for name in named):
            return None
        if not reader.may_read(self.data.get("key", "")):
            return None
        return replace(self, data={name: value for name, value in self.data.items() if name not in ("key", "groups")})


@dataclass(frozen=True, slots=True)
class TrainingHistory:
    """The course of one adapter's training since the run began.

    Attributes:
        events: updates, evaluations, rollbacks and so on, oldest first; not those of single trajectories. Of the time
            before the server was started again there are only updates and evaluations, without an `id`.
        truncated: there are older ones.
        last_event_id: of the newest event of all adapters; a listener that begins after it misses nothing.
    """

    adapter: str
    events: tuple[TrainingEvent, ...] = ()
    truncated: bool = False
    last_event_id: str = ""
