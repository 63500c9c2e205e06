"""People: takes their edits, and their opinions of answers that do not wait any more. Each is on the disk before it is
acknowledged.

opinion of an answer that was dropped ─▶ journal ─▶ copy ─▶ late feedback, learnt with kto
edit ──▶ chosen and rejected, or chosen only ▶ a group of its own, learnt with dpo or cross_entropy
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlx_parallm.core.json_values import ANSWER
from mlx_parallm.core.readers import EVERYTHING, Reader
from mlx_parallm.core.requests import CollectionSpec, Signal
from mlx_parallm.core.trajectories import FeedbackCard, Trajectory
from mlx_parallm.errors import (
    ConflictError,
    QueueFullError,
    RequestError,
    UnknownModelError,
    UnknownTrajectoryError,
    shown,
)
from mlx_parallm.rl.recording import LATE, NOT_COUNTED, late_copy, late_opinion
from mlx_parallm.rl.runs.records import Fate, Feedback, Score
from mlx_parallm.rl.sources import KeyReport, SourceReport
from mlx_parallm.rl.trajectories import ABOUT, DropReason, TrajectoryGroup

if TYPE_CHECKING:
    from mlx_parallm.rl.service import TrainingService

_USER = "user"


@dataclass(frozen=True, slots=True)
class FoundTrajectory:
    """An answer that was collected, in any state. `adapter`: the name of the adapter that it trains."""

    adapter: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str


EditSignal = Literal[Signal.PREFERENCES, Signal.CORRECTIONS]


@dataclass(frozen=True, slots=True)
class Edit:
    """An answer that a person has written or chosen.

    Attributes:
        adapter: the name of the adapter that learns from it.
        rejected_ids: of an answer to the same prompt that is worse; empty: `chosen_ids` are imitated.
        user: who says so; empty if that is not known. The last edit of one user `about` one thing counts.
        about: the id of the trajectory that was edited; empty: the prompt is what it is about.
        owner: the name of the API key that sent it; None: that is not known.
    """

    adapter: str
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...] = ()
    chosen_text: str = ""
    rejected_text: str = ""
    user: str = ""
    about: str = ""
    owner: str | None = None

    @property
    def signal(self) -> EditSignal:
        return Signal.PREFERENCES if self.rejected_ids else Signal.CORRECTIONS


@dataclass(frozen=True, slots=True)
class EditCard:
    """The edit that waits for an update. It is on the disk."""

    __pydantic_config__ = ANSWER

    edit_id: str
    """Its id. The edit is learnt from as the group of this id."""
    signal: EditSignal
    """`preferences`: trained with dpo. `corrections`: imitated."""
    adapter: str
    """The adapter that learns from it."""
    waiting: int
    """Edits of this kind that wait for an update."""
    wanted: int
    """Edits of this kind that make an update."""
    is_new: bool = True
    """False: the same edit waits already, and counts once."""
    status: Literal["success"] = "success"


@dataclass(frozen=True, slots=True)
class SignalReport:
    """What an adapter was taught by since the server started."""

    __pydantic_config__ = ANSWER

    adapter: str
    """The adapter."""
    opinions: int
    """Scores that were taken as feedback."""
    people: int
    """Different users who sent feedback or edits, at most those that are remembered. Requests without a `user` do not
    count."""
    sources: Sequence[SourceReport]
    """One entry for each source of which something came."""
    keys: Sequence[KeyReport]
    """From whose data it has learnt, most first. Only an admin key sees the names of others."""


class People:
    """Late feedback and edits. Event loop's thread only."""

    def __init__(self, training: TrainingService) -> None:
        self._training, self._collector, self._journal = training, training.trajectories, training.parts.journal
        self._buffer, self._ledger = self._collector.buffer, training.ledger
        self._lock = asyncio.Lock()  # what is looked up stays true until it has changed

    # -- opinions of answers that were dropped ----------------------------------------------------

    async def late_feedback(
        self, trajectory_id: str, score: float, user: str, error: RequestError, reader: Reader = EVERYTHING
    ) -> FeedbackCard:
        """An opinion of an answer that does not wait. Raises `error`, or why it does not count."""
        async with self._lock:
            fate = await self._journal.fate(trajectory_id)
            if fate is None or fate.state == "" or trajectory_id.startswith(LATE):
                raise error
            if not (reader.may_read(fate.trajectory.owner) and reader.sees(fate.adapter)):
                raise error
            _check_counts(fate)
            copy = late_copy(fate.trajectory)
            opinion = late_opinion(copy, score, user)
            earlier = await self._journal.fate(copy.trajectory_id)
            if earlier is None:
                self._check_trained_here(fate.adapter)
                await self._collector.keep(fate.adapter, Signal.LATE_FEEDBACK.value, [copy], [opinion])
            elif earlier.state == "":
                await self._collector.enter(opinion)
            else:
                raise ConflictError(
                    f"Late feedback on this answer has led to its end already: it was {_end(earlier)}.",
                    param="trajectory_id",
                )
        known = self._buffer.member(copy.trajectory_id)
        assert known is not None
        return self._collector.opinion(known[0], copy.trajectory_id, user, late=True)

    async def recall(self, opinions: Sequence[Feedback]) -> None:
        """Takes opinions as late feedback that were acknowledged before a restart, and whose answers are too old now.
        What does not count any more is left out."""
        for opinion in opinions:
            with suppress(RequestError, QueueFullError):
                refused = UnknownTrajectoryError("It is not in the journal.")
                await self.late_feedback(opinion.trajectory_id, opinion.score, opinion.user, refused)

    # -- edits -----------------------------------------------------------------------------------

    async def find(self, trajectory_id: str, reader: Reader = EVERYTHING) -> FoundTrajectory:
        """A trajectory of this run, in any state. Raises UnknownTrajectoryError: there is none of this id that
        the reader may read."""
        adapter, turn = "", None
        known = self._buffer.member(trajectory_id)
        if known is not None:
            adapter, turn = known[0].adapter, known[1].turn(trajectory_id)
        elif (fate := await self._journal.fate(trajectory_id)) is not None:
            adapter, turn = fate.adapter, fate.trajectory
        if turn is None or not (reader.may_read(turn.owner) and reader.sees(adapter)):
            raise UnknownTrajectoryError(f"No trajectory of this run has the id {shown(trajectory_id)}.")
        return FoundTrajectory(adapter, turn.prompt_ids, turn.completion_ids, turn.text)

    async def edit(self, edit: Edit, reader: Reader = EVERYTHING) -> EditCard:
        """Adds an edit to those that wait for an update, and returns when it is on the disk. It takes the place of one
        of the same user about the same thing that waits.

        Raises:
            UnknownModelError: the adapter is not trained here, or the reader does not see it.
            QueueFullError: too many wait.
            StorageError: it could not be written, and does not count.
        """
        reader.named(edit.adapter, self._training.default_adapter)
        return await self._training.changes.finished(self._edit(edit))

    async def _edit(self, edit: Edit) -> EditCard:
        self._check_trained_here(edit.adapter)
        async with self._lock:
            waiting = self._buffer.ready(edit.adapter, edit.signal)
            same = next((group for group in waiting if _is_same(group, edit)), None)
            if same is not None:
                return self._card(same.group_id, edit, is_new=False)
            replaced = [group for group in waiting if _is_replaced(group, edit)]
            edit_id = f"{edit.signal.value}-{uuid.uuid4().hex}"
            trajectories = _trajectories(edit_id, edit)
            scores = [Score(each.trajectory_id, 1.0 - place) for place, each in enumerate(trajectories)]
            await self._collector.keep(edit.adapter, edit.signal.value, trajectories, scores)
            for group in replaced:
                if self._buffer.holds(group):
                    self._buffer.drop(group, DropReason.REPLACED)
        self._ledger.person(edit.adapter, edit.user)
        return self._card(edit_id, edit)

    def _card(self, edit_id: str, edit: Edit, is_new: bool = True) -> EditCard:
        waiting = len(self._buffer.ready(edit.adapter, edit.signal))
        wanted = self._training.parts.config.people.update_frequency
        return EditCard(edit_id, edit.signal, edit.adapter, waiting, wanted, is_new)

    # -- what was learnt from --------------------------------------------------------------------

    def signal_report(self, adapter: str | None = None, reader: Reader = EVERYTHING) -> SignalReport:
        """What the adapter was taught by since the process started. Raises UnknownModelError: it is not trained,
        or the reader does not see it."""
        name = reader.named(adapter, self._training.default_adapter)
        self._check_trained_here(name)
        sources, keys = self._ledger.report(name, self._buffer.of(name)), self._ledger.keys(name, reader)
        return SignalReport(name, *self._ledger.people(name), sources, keys)

    def _check_trained_here(self, adapter: str) -> None:
        if not self._training.has_adapter(adapter):
            raise UnknownModelError(
                f"{shown(adapter)} is not trained here; begin with POST /v1/training/start.", param="lora_adapter"
            )


def install(training: TrainingService) -> People:
    """Lets people edit answers, and judge those that do not wait any more."""
    people = People(training)
    training.trajectories.late_feedback = people.late_feedback
    training.hooks.too_late.append(people.recall)
    return people


# -- opinions of answers that were dropped ---------------------------------------------------------


def _check_counts(fate: Fate) -> None:
    """Raises ConflictError: an opinion of this answer comes too late even for late feedback."""
    if fate.state == "trained":
        raise ConflictError("The answer was trained on already; feedback counts only before that.", "trajectory_id")
    if fate.reason in NOT_COUNTED:
        raise ConflictError(f"The answer was {_end(fate)}: it will not be trained on.", "trajectory_id")


def _end(fate: Fate) -> str:
    return f"{fate.state} ({fate.reason})" if fate.reason else fate.state


# -- edits as groups -------------------------------------------------------------------------------


def _trajectories(edit_id: str, edit: Edit) -> list[Trajectory]:
    """The chosen answer, and the rejected one if there is one."""
    metadata = {_USER: edit.user, ABOUT: edit.about}
    answers = [("chosen", edit.chosen_ids, edit.chosen_text), ("rejected", edit.rejected_ids, edit.rejected_text)]
    given = [answer for answer in answers if answer[1]]
    return [
        Trajectory(
            trajectory_id=f"{edit_id}-{which}",
            group_id=edit_id,
            group_size=len(given),
            adapter=None,
            prompt_ids=edit.prompt_ids,
            completion_ids=ids,
            sampling_logprobs=(),
            temperature=1.0,
            text=text,
            finish_reason=None,
            collection=CollectionSpec(edit.signal.value, metadata, signal=edit.signal),
            created=time.time(),
            owner=edit.owner,
        )
        for which, ids, text in given
    ]


def _is_same(group: TrajectoryGroup, edit: Edit) -> bool:
    """Whether a waiting group is just this edit, sent before."""
    first = group.members[0].trajectory
    completions = [member.trajectory.completion_ids for member in group.members]
    return (
        _is_edit_of(group, edit)
        and first.prompt_ids == edit.prompt_ids
        and completions == [ids for ids in (edit.chosen_ids, edit.rejected_ids) if ids]
    )


def _is_replaced(group: TrajectoryGroup, edit: Edit) -> bool:
    """Whether a waiting group is an earlier edit of the same user about the same thing."""
    first = group.members[0].trajectory
    about = first.collection.metadata.get(ABOUT) or first.prompt_ids
    return bool(edit.user) and _is_edit_of(group, edit) and about == (edit.about or edit.prompt_ids)


def _is_edit_of(group: TrajectoryGroup, edit: Edit) -> bool:
    """Whether a waiting group is an edit of the same user of the same key."""
    user = group.members[0].trajectory.collection.metadata.get(_USER, "")
    return (user, group.owner) == (edit.user, edit.owner or "")
