"""What becomes of requests marked for training: trajectories, rewards, updates; and who is asked about them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_parallm.core.adapters import AdapterRef, CheckpointCard
from mlx_parallm.core.requests import Collection, FinishReason


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished sequence as it was drawn; nothing in it is ever tokenised again.

    `sampling_logprobs`: fp32 nats, one for each of `completion_ids`, of the distribution that drew the token: the
    model's with `adapter`, at `temperature`, without filters or penalties. `completion_ids` ends with the
    end-of-sequence token where `finish_reason` is STOP by one; `text` leaves it out. `created`: Unix seconds.
    `group_size`: trajectories that its group will have.
    """

    trajectory_id: str
    group_id: str
    group_size: int
    adapter: AdapterRef
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    temperature: float
    text: str
    finish_reason: FinishReason
    collection: Collection
    created: float


@dataclass(frozen=True, slots=True)
class TrajectoryCard:
    """A trajectory and where it stands. `state`: waiting (for a reward), scored, training, trained, dropped.

    `reward` None: not scored yet. `reason`: why it was dropped, else "".
    """

    trajectory: Trajectory
    reward: float | None
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GivenTrajectory:
    """Training data that a client brings; ids as the model's tokenizer has them.

    `group_id`: trajectories of one prompt share it; their rewards are compared. `sampling_logprobs` empty: not known,
    the trainer's own stand in. `reward` None: the loss cross_entropy imitates it whatever it is worth; every other
    loss needs a reward.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    reward: float | None = None
    group_id: str = ""
    sampling_logprobs: tuple[float, ...] = ()
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One update. `status`: published (live now), trained (not published, as asked), held (the gate refused it: the
    adapter is as before) or skipped (nothing was learnt: `reason`).

    `step`: optimizer steps of this adapter so far. `metrics`: loss, reward_mean, reward_std, kl, entropy, ... by name.
    """

    adapter: AdapterRef | None
    step: int
    status: str
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """A snapshot for one adapter. Times are Unix seconds. `drops`, `skips`: counts by reason, since start.

    `state`: disabled, idle, running, updating or paused. `current`: the live version, None before the first one.
    `metrics`: of the last update. `trajectories_waiting`: for a reward.
    """

    enabled: bool
    state: str = "disabled"
    adapter: str = ""
    current: AdapterRef | None = None
    step: int = 0
    trajectories_collected: int = 0
    trajectories_waiting: int = 0
    groups_ready: int = 0
    updates_total: int = 0
    updates_per_second: float = 0.0
    last_update: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    drops: Mapping[str, int] = field(default_factory=dict)
    skips: Mapping[str, int] = field(default_factory=dict)
    reward_running_mean: float | None = None
    best: AdapterRef | None = None
    checkpoints: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingEvent:
    """`kind`: collected, scored, dropped, update, held, skipped, rollback, checkpoint, paused, resumed, started; or
    events_lost, where a listener did not keep up: `data.events` says how many are missing there.
    """

    kind: str
    at: float
    data: Mapping[str, Any] = field(default_factory=dict)


class TrainingClient(Protocol):
    """The asyncio face of training. Used on the event loop's thread only. `adapter` None: the default one.

    Every method that names a trained adapter raises UnknownModelError where it is not trained, and every one but
    `status` raises TrainingDisabledError (409) where training is off.
    """

    async def check(self, collection: Collection, adapter: AdapterRef) -> None:
        """Whether a request may be collected: before it is generated. It may wait for a child process.

        Raises:
            OverloadedError: too many others are being checked.
            InvalidRequestError: unknown scorer, or `metadata` lacks what it reads.
            ConflictError: the adapter that would draw it is not trained here.
            TrainingDisabledError: training is off.
        """
        ...

    def feedback(self, trajectory_id: str, score: float) -> None:
        """A reward that comes later; the last one before training counts. One for one sample of a group is enough.

        Raises:
            UnknownTrajectoryError: no such trajectory, or not any more.
            ConflictError: it was trained on, or dropped.
        """
        ...

    async def update(
        self,
        adapter: str | None = None,
        given: Sequence[GivenTrajectory] | None = None,
        publish: bool = True,
        checkpoint_name: str | None = None,
    ) -> UpdateReport:
        """One update now, of the complete groups that wait or of `given`; returns when it is live.

        `checkpoint_name`: the policy is saved under this tag then, whatever came of the update.

        Raises:
            ConflictError: there is nothing to save: the policy is equal to the base.
            StorageError: the update is made, and could not be saved.
        """
        ...

    def status(self, adapter: str | None = None) -> TrainingStatus: ...

    async def start(self, adapter: str | None = None) -> TrainingStatus:
        """Trains this adapter too, from its live version, or from nothing (equal to the base)."""
        ...

    async def pause(self, adapter: str | None = None) -> TrainingStatus:
        """No update begins by itself any more; trajectories are still collected."""
        ...

    async def resume(self, adapter: str | None = None) -> TrainingStatus: ...

    async def rollback(self, adapter: str | None = None, to: str | None = None) -> TrainingStatus:
        """Serves and trains on from an earlier version: `best` (None), or a checkpoint's name or tag.

        Raises:
            ConflictError: there is none to go back to.
        """
        ...

    def trains(self, selector: str | None) -> bool:
        """Whether this names an adapter whose policy is in training here and live: `save` is how it is saved then."""
        ...

    async def save(
        self, adapter: str | None, step: int | None, tags: Sequence[str], metrics: Mapping[str, float]
    ) -> CheckpointCard:
        """Writes the policy with its optimizer's state as checkpoint `step` (None: the step it has reached), once the
        update that is under way has ended.

        Raises:
            InvalidRequestError: a tag is not a plain name.
            ConflictError: it is equal to the base as yet; there is a checkpoint of that step with other content.
        """
        ...

    def events(self) -> AsyncIterator[TrainingEvent]:
        """From now on, until closed. A listener that does not keep up loses the oldest, and reads an
        event `events_lost` in their place.
        """
        ...

    def trajectories(self, limit: int) -> tuple[TrajectoryCard, ...]:
        """The newest, newest first."""
        ...
