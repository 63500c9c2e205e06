"""What training reports: its events, figures that have diverged, the rollouts that a server samples by itself, updates
and evaluations, and its status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from mlx_parallm.core.adapters import AdapterText
from mlx_parallm.core.json_values import ANSWER, NOT_SENT, Figure, JsonObject, ShownAs, UnixTime, sent_as
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
    """One event of the stream."""

    __pydantic_config__ = ANSWER

    kind: str
    """The kind of event; also its name in the stream. `collected`, `closed` (a group that requests have named),
    `scored`, `dropped`, `updating` (an update begins), `update`, `held`, `skipped`, `evaluation`, `evaluation_failed`,
    `divergence`, `plateau` (nearly all answers earn the same part of the reward), `plateau_ended`, `rollback`,
    `comparison_started`, `comparison_ended`, `lesson_started`, `lesson_ended`, `checkpoint`, `averaged` (an average of
    adapters was made), `forgotten` (a version was rebuilt without some data), `paused`, `resumed`, `started`,
    `stopped`, `placeholder_logprobs` (the log-probabilities of samples are all 0; once for each adapter and start), or
    `events_lost`. The last one replaces events that a listener has missed; `data.events` is their number, or null if
    that is not known."""
    at: UnixTime
    """Time in ISO-8601, UTC."""
    data: JsonObject = field(default_factory=dict)
    """Details, by kind."""
    id: str = field(default="", metadata=NOT_SENT)
    """By which a listener that comes back names the last event it has had; empty for `events_lost`, and for events of
    earlier processes."""

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
    """The course of one adapter's training since the run began."""

    __pydantic_config__ = ANSWER

    adapter: str
    """The adapter."""
    data: tuple[TrainingEvent, ...] = ()
    """Its updates, evaluations, rollbacks, checkpoints, divergences, pauses, comparisons and lessons, oldest first. Of
    the time before the server was started again there are only updates and evaluations."""
    truncated: bool = False
    """Whether there are older ones."""
    last_event_id: str = ""
    """With it as `Last-Event-ID`, `/v1/training/events` begins right after this answer."""
    object: Literal["list"] = "list"


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


UpdateStatus = Literal["published", "trained", "held", "skipped"]


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The result of one update."""

    __pydantic_config__ = ANSWER

    adapter: AdapterText | None
    """The new version."""
    step: int
    """Optimizer steps so far."""
    status: UpdateStatus
    """`published`: the new version is live. `trained`: it is not published, as requested. `held`: the gate refused it,
    and the adapter is unchanged. `skipped`: there was nothing to learn."""
    reason: str = ""
    """Why it was held or skipped."""
    metrics: Mapping[str, Figure] = field(default_factory=dict)
    """Metrics of the update by name; null if not finite."""
    checkpoint: str | None = None
    """Name of the checkpoint, if one was saved; never null if `checkpoint_name` was given."""
    signal: Signal = Signal.REWARDS
    """What it learnt from: answers with `rewards`, or what people said."""
    divergences: tuple[Divergence, ...] = field(default=(), metadata=NOT_SENT)
    """Its figures that are beyond their limits."""
    advice: str = field(default="", metadata=NOT_SENT)
    """What people should change, because answers are on a plateau; empty if there is nothing."""
    given_back: bool = field(default=False, metadata=NOT_SENT)
    """Whether it was skipped, and its trajectories wait for another update, because the teacher scored none of them."""

    @property
    def evaluation(self) -> tuple[float, float, float] | None:
        """The mean reward on the held-out tasks, with the bounds of its 95 % interval; None if there was none."""
        mean, low, high = (self.metrics.get(f"eval_{name}") for name in ("mean", "low", "high"))
        return None if mean is None or low is None or high is None else (mean, low, high)


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


def _or_null(name: str) -> str | None:
    return name or None


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """A snapshot of one adapter's training."""

    __pydantic_config__ = ANSWER

    state: str = "disabled"
    """`disabled`, `idle`, `running`, `updating`, `paused` or `stopped`."""
    pause_reason: str | None = None
    """Why no automatic updates are made: `asked`, or in words; null if they are."""
    adapter: Annotated[str, ShownAs(_or_null, str | None)] = ""
    """The trained adapter."""
    current: AdapterText | None = field(default=None, metadata=sent_as("live_lora"))
    """Its live version."""
    step: int = 0
    """Optimizer steps so far."""
    trajectories_collected: int = 0
    """Trajectories collected since start."""
    trajectories_waiting: int = 0
    """Trajectories that wait for a reward."""
    groups_ready: int = 0
    """Complete groups that wait for an update."""
    groups_open: int = 0
    """Groups with a `group_id` or `episode_id` that wait for more answers."""
    turns: Mapping[str, int] = field(default_factory=dict)
    """Turns of episodes: `first`; `continued`, whose prompts continue the tokens of an earlier turn; and `apart`, which
    do not, so that each of them becomes a sample of its own."""
    updates_total: int = 0
    """Updates since start."""
    updates_per_second: float = 0.0
    """Recent rate of updates."""
    last_update: UnixTime | None = None
    """Time of the last update, in ISO-8601, UTC."""
    metrics: Mapping[str, Figure] = field(default_factory=dict)
    """All metrics of the last update, by name."""
    drops: Mapping[str, int] = field(default_factory=dict)
    """Trajectories dropped, by reason."""
    skips: Mapping[str, int] = field(default_factory=dict)
    """Updates skipped, by reason."""
    diverged: Mapping[tuple[str, str], int] = field(default_factory=dict, metadata=NOT_SENT)
    """Divergences since start, by signal and action."""
    last_divergences: tuple[Divergence, ...] = field(default=(), metadata=sent_as("divergences"))
    """The last divergences, oldest first, 8 at most."""
    advice: str = ""
    """What to change, because nearly all answers earn the same part of the reward; empty if there is nothing."""
    reward_running_mean: Figure | None = None
    """Running mean of the rewards over updates."""
    best: AdapterText | None = field(default=None, metadata=sent_as("best_lora"))
    """The version with the best evaluation; without evaluations, with the best running mean of rewards."""
    evaluation: EvaluationResult | None = None
    """The last evaluation; null if there was none."""
    rollouts: RolloutStatus | None = None
    """The rollouts of the environment that the server samples by itself; null if it samples none."""
    checkpoints: tuple[str, ...] = field(default=(), metadata=sent_as("available_checkpoints"))
    """Names of its checkpoints, oldest first, each followed by its tags."""
    trained: tuple[str, ...] = field(default=(), metadata=sent_as("trained_adapters"))
    """All adapters that this server trains."""
    detail: JsonObject = field(default_factory=dict, metadata=NOT_SENT)
    """The trainer's state, for people."""
