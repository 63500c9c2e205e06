"""What the journal of a run keeps, and how it is written as JSON and read back.

Every type here is a plain dataclass. A new field with a default needs nothing else: it is written, and a journal that
lacks it can be read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from mlx_parallm.core.requests import Signal
from mlx_parallm.core.trajectories import GivenTrajectory, Trajectory
from mlx_parallm.train.data import UpdateSettings

_DIGEST = 16
"""Characters of a digest of settings."""

# -- what comes in -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrival:
    """Trajectories that came in together, in order."""

    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Feedback:
    """An opinion of an answer or a turn. `user`: whose it is; empty if that is unknown. `key`: see `Closed`."""

    trajectory_id: str
    score: float
    user: str = ""
    key: str | None = None


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """A client's rewards of the tokens of an answer or a turn. `key`: see `Closed`."""

    trajectory_id: str
    rewards: tuple[float, ...]
    key: str | None = None


@dataclass(frozen=True, slots=True)
class EpisodeReward:
    """A client's reward of an episode. `group_id`: as the client sent it, empty if it named no group. `key`: see
    `Closed`."""

    episode_id: str
    group_id: str
    score: float
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """A scoring function's reward of a member of a group, by the id of its last trajectory."""

    trajectory_id: str
    reward: float


@dataclass(frozen=True, slots=True)
class Closed:
    """No more members come into a group. `key`: the name of the API key that has sent what this entry is about. None:
    any key, in entries of older versions."""

    group_id: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Fate:
    """A trajectory of the journal, and what became of it. `state`: trained, dropped, or empty while it waits."""

    adapter: str
    trajectory: Trajectory
    state: str = ""
    reason: str = ""


GroupEntry = Feedback | TokenRewards | EpisodeReward | Score | Closed
"""What happens to trajectories that have arrived, before they are trained on or dropped."""


# -- what changes a policy -----------------------------------------------------------------------


CHANGED = ("published", "trained")
"""The statuses of updates that have changed the policy."""


@dataclass(frozen=True, slots=True)
class TrainedEpisode:
    """One member of a group. Its turns are the trajectories of the journal with `trajectory_ids` or, if a client sent
    it with the update, `given`. `token_rewards`: see `trajectories.Episode`."""

    trajectory_ids: tuple[str, ...] = ()
    token_rewards: tuple[tuple[float, ...], ...] = ()
    given: tuple[GivenTrajectory, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """One group of an update, as the update saw it; see `objectives.ScoredGroup`."""

    episodes: tuple[TrainedEpisode, ...]
    rewards: tuple[float, ...]
    scorer: str
    staleness: int = 0
    on_policy: bool = False
    signal: Signal = Signal.REWARDS
    remembered: bool = False

    @property
    def trajectory_ids(self) -> tuple[str, ...]:
        return tuple(one for episode in self.episodes for one in episode.trajectory_ids)

    @property
    def is_given(self) -> bool:
        """Whether a client sent its trajectories with the update."""
        return any(episode.given for episode in self.episodes)


@dataclass(frozen=True, slots=True)
class Start:
    """Training started from the live version `base`, or from a new policy if it is empty. `made`: the version that
    equals this policy and was made live, by this start or by a later one from a checkpoint; empty if there is none."""

    base: str = ""
    made: str = ""


@dataclass(frozen=True, slots=True)
class Rollback:
    """The policy of `checkpoint` replaced the current one. Empty: that policy is in no checkpoint. `lineage`: the
    versions that training had continued from then, oldest first. `baselines`: of rewards, which a rollback keeps; see
    `RewardHistory.baselines`. None: a version wrote it that did not keep them. `rebuilt`: above
    0, it is no earlier policy, but the one that the updates up to here make without data that were forgotten; the
    number of the first update that was made again."""

    checkpoint: str = ""
    lineage: tuple[str, ...] = ()
    baselines: Mapping[str, float] | None = None
    rebuilt: int = 0

    def __post_init__(self) -> None:
        if self.rebuilt and not self.lineage:
            raise ValueError("a policy that was made again has no version")


@dataclass(frozen=True, slots=True)
class Update:
    """One update: all that is needed to make it again, and what it reported. It changed the policy; or it had no
    signal, and its rewards moved the baselines that later rewards are compared with; or neither moved, and it has no
    groups: then only `trend` counts.

    Attributes:
        wanted: trajectories that made a whole update; None: all that there were.
        publish: whether a version was to be made of it.
        version: number of that version, or of the one with which a later process started from its checkpoint; None if
            there is none.
        progress: see `AdapterTraining.progress`. `all_progress`: it has all that there was after the update, and not
            only what the update named.
        learning_rate: see `UpdateBatch`.
        explores: whether it looked for a way out of a plateau.
        teacher_logprobs: for each sample, those of a teacher; see `teachers.TeacherLogprobs`. None: its loss read none,
            or an older version wrote it.
        trend: of rewards when it began; see `AdapterTraining.observed_rewards`. None: an older version wrote it.
        reduced: whether a compaction has removed its groups, so that it cannot be made again; see `compaction`.
        settings: digest of the settings that it was made with, which the journal keeps; empty: an older version wrote
            it.
        owners: of its trajectories; see `Trajectory.owner`. They stay when it is reduced. None: an older version wrote
            it.
        forgotten: episodes that were removed from it later, on request.
    """

    groups: tuple[TrainedGroup, ...]
    wanted: int | None
    publish: bool
    version: int | None
    status: str
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    progress: Mapping[str, float] = field(default_factory=dict)
    learning_rate: float | None = None
    explores: bool = False
    all_progress: bool = False
    teacher_logprobs: tuple[tuple[float, ...], ...] | None = None
    trend: Mapping[str, float] | None = None
    reduced: bool = False
    settings: str = ""
    owners: tuple[str | None, ...] | None = None
    forgotten: int = 0

    @property
    def changed_policy(self) -> bool:
        return self.status in CHANGED

    @property
    def trajectory_ids(self) -> tuple[str, ...]:
        return tuple(one for group in self.groups for one in group.trajectory_ids)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an update; see `Update`."""

    progress: Mapping[str, float] = field(default_factory=dict)
    all_progress: bool = False


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """One change of an adapter's policy, or only of its baselines. `number` counts the changes of this adapter, from 1;
    `at` is Unix time."""

    adapter: str
    number: int
    at: float
    body: Start | Rollback | Update


@dataclass(frozen=True, slots=True)
class LearningSettings:
    """The settings that a policy follows from, with the data of its updates. `seed`: of the factors of a new one."""

    seed: int
    update: UpdateSettings


# -- JSON ----------------------------------------------------------------------------------------

_TRAJECTORY = TypeAdapter(Trajectory)
_SETTINGS = TypeAdapter(LearningSettings)
_PROGRESS = TypeAdapter(Progress)
_NAMES = TypeAdapter(tuple[str, ...])
_KINDS: Mapping[type, str] = {
    Arrival: "arrival",
    Feedback: "feedback",
    TokenRewards: "token_rewards",
    EpisodeReward: "episode_reward",
    Score: "score",
    Closed: "closed",
    Start: "start",
    Rollback: "rollback",
    Update: "update",
}
_TYPES: Mapping[str, TypeAdapter[Any]] = {name: TypeAdapter(kind) for kind, name in _KINDS.items()}


def trajectory_to_json(trajectory: Trajectory) -> str:
    """Numbers are exact. What JSON does not have, in the metadata, is written as text."""
    return _to_json(_TRAJECTORY, trajectory)


def trajectory_from_json(text: str) -> Trajectory:
    """Raises ValueError: it is not what `trajectory_to_json` wrote."""
    return _TRAJECTORY.validate_python(json.loads(text))


def settings_to_json(settings: LearningSettings) -> tuple[str, str]:
    """The digest of settings, by which updates name them, and their content."""
    text = json.dumps(_SETTINGS.dump_python(settings, mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST], text


def settings_from_json(text: str) -> LearningSettings:
    """Raises ValueError: it is not what `settings_to_json` wrote."""
    return _SETTINGS.validate_python(json.loads(text))


def body_to_json(body: Arrival | GroupEntry | Start | Rollback | Update) -> tuple[str, str]:
    """The kind of an entry, and its content."""
    kind = _KINDS[type(body)]
    return kind, _to_json(_TYPES[kind], body)


def body_from_json(kind: str, text: str) -> Any:
    """Raises ValueError: it is not what `body_to_json` wrote."""
    if kind not in _TYPES:
        raise ValueError(f"an entry of the unknown kind {kind[:40]!r}")
    return _TYPES[kind].validate_python(json.loads(text))


def names_from_json(text: str) -> tuple[str, ...]:
    """The names in a list. Raises ValueError."""
    return _NAMES.validate_python(json.loads(text))


def progress_from_json(text: str) -> Progress:
    """The progress in the content of an update, of which nothing else is checked. Raises ValueError."""
    return _PROGRESS.validate_python(json.loads(text))


def _to_json(adapter: TypeAdapter[Any], value: object) -> str:
    text = json.dumps(adapter.dump_python(value), ensure_ascii=False, default=str)
    return text.encode(errors="replace").decode()  # half of a surrogate pair, which a client may send, is no text
