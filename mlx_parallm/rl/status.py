"""What training reports: its events, figures that have diverged, the rollouts that a server samples by itself, updates
and evaluations, and its status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mlx_parallm.core.adapters import AdapterRef, AdapterText
from mlx_parallm.core.json_values import ANSWER, Figure, UnixTime
from mlx_parallm.core.readers import Reader
from mlx_parallm.core.requests import Signal


@dataclass(frozen=True, slots=True)
class Divergence:
    """A figure of training that is beyond its limit."""

    signal: str
    """`not_finite`, `kl_step`, `ratio`, `kl`, `entropy`, `length` or `reward`: the keys of `rl_training.divergence`."""
    value: Figure
    """The figure; null if it is not finite."""
    limit: float | None
    """Its limit; null for `not_finite`."""
    action: str
    """What was done: `tell`, `hold`, `pause` or `roll_back`."""
    reason: str
    """The same in words."""
    at: UnixTime
    """Time in ISO-8601, UTC."""


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


LEVEL_PREFIX = "curriculum/"
"""What the names of a level's figures begin with, such as `curriculum/easy/success`."""


@dataclass(frozen=True, slots=True)
class LevelCard:
    """A level of the tasks of a curriculum."""

    level: str
    """Its name."""
    success: float
    """Mean reward of its recent tasks, from 0 to 1."""
    share: float
    """Probability that the next task is of this level."""
    drawn: int
    """Tasks of it since the curriculum began, those of earlier processes of the run included."""


RolloutState = Literal["drawing", "waiting", "paused", "failed"]


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """Rollouts that the server samples by itself."""

    environment: str
    """The environment that the tasks come from."""
    state: RolloutState
    """`drawing`; `waiting`: the next update has enough trajectories; `paused`, as training or the engine is; `failed`:
    nothing more is sampled."""
    tasks_taken: int
    """Tasks taken from the environment, those of earlier processes of the run included."""
    groups_drawn: int
    """Tasks answered since start. Some of their episodes may have failed."""
    tasks_failed: int
    """Tasks since start that could not be answered."""
    last_failure: str
    """The last failure of a task, an episode or the environment; empty if there was none."""
    levels: tuple[LevelCard, ...]
    """Those of the curriculum, as far as they are known; empty without a curriculum."""

    @property
    def outcomes(self) -> Mapping[str, int]:
        """Tasks since start, by outcome."""
        return {"drawn": self.groups_drawn, "failed": self.tasks_failed}


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The result of one update.

    Attributes:
        step: optimizer steps of this adapter so far.
        status: published (the new version is live), trained (not published, as requested), held (the gate refused it,
            so the adapter is unchanged) or skipped (nothing was learnt).
        reason: why the update was held or skipped.
        metrics: loss, reward_mean, reward_std, kl, entropy and others by name.
        signal: what it has learnt from.
        divergences: its figures that are beyond their limits.
        advice: what people should change, because answers are on a plateau; empty if there is nothing.
        given_back: it was skipped, and its trajectories wait for another update, because the teacher scored none of
            them.
    """

    adapter: AdapterRef | None
    step: int
    status: str
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    checkpoint: str | None = None
    signal: Signal = Signal.REWARDS
    divergences: tuple[Divergence, ...] = ()
    advice: str = ""
    given_back: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The mean reward of one version on the held-out tasks."""

    __pydantic_config__ = ANSWER

    adapter: AdapterText
    """The version that was evaluated."""
    step: int
    """Optimizer steps of the version."""
    mean: float
    """Mean reward."""
    low: float
    """Lower bound of the 95 % confidence interval of the mean, over tasks like these."""
    high: float
    """Upper bound of that interval."""
    answers: int
    """Answers that were scored, or episodes that have ended with a reward; several for each task if
    `rl_training.evaluation.samples` says so."""
    failed: int
    """Held-out tasks of which an answer or an episode failed, or could not be scored. Such ones are left out."""
    at: UnixTime
    """Time in ISO-8601, UTC."""

    @property
    def metrics(self) -> dict[str, float]:
        """The figures by their names in the metrics of an update."""
        figures = {"mean": self.mean, "low": self.low, "high": self.high}
        counts = {"answers": self.answers, "failed": self.failed}
        return {f"eval_{name}": float(value) for name, value in (figures | counts).items()}


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """A snapshot of one adapter's training.

    Attributes:
        state: disabled, idle, running, updating, paused or stopped.
        pause_reason: why no automatic updates are made; None: they are.
        current: the live version; None before the first one.
        trajectories_waiting: trajectories without a reward.
        groups_open: groups to which requests may still add.
        turns: turns of episodes: the first ones, those whose prompts continue the tokens of an earlier turn
            (continued), and others (apart), each of which becomes a sample of its own.
        last_update: Unix time in seconds.
        metrics: of the last update.
        best: by its evaluation; without evaluations, by the running mean of its rewards.
        evaluation: the last one.
        rollouts: those that the server samples by itself for this adapter; None: it samples none.
        checkpoints: names of its checkpoints, oldest first, each followed by its tags.
        drops, skips: counts by reason since start.
        advice: see `UpdateReport`.
        diverged: counts by signal and action since start. last_divergences: the newest ones, oldest first.
    """

    state: str = "disabled"
    pause_reason: str | None = None
    adapter: str = ""
    current: AdapterRef | None = None
    step: int = 0
    trajectories_collected: int = 0
    trajectories_waiting: int = 0
    groups_ready: int = 0
    groups_open: int = 0
    turns: Mapping[str, int] = field(default_factory=dict)
    updates_total: int = 0
    updates_per_second: float = 0.0
    last_update: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    drops: Mapping[str, int] = field(default_factory=dict)
    skips: Mapping[str, int] = field(default_factory=dict)
    diverged: Mapping[tuple[str, str], int] = field(default_factory=dict)
    last_divergences: tuple[Divergence, ...] = ()
    advice: str = ""
    reward_running_mean: float | None = None
    best: AdapterRef | None = None
    evaluation: EvaluationResult | None = None
    rollouts: RolloutStatus | None = None
    checkpoints: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)
