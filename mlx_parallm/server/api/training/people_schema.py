"""Bodies and response objects of the routes that take what people say: edits, and the report of what was learnt."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mlx_parallm.rl.people import EditCard
from mlx_parallm.server.api.adapters.schema import MAX_NAME
from mlx_parallm.server.api.chat.messages import Messages
from mlx_parallm.server.api.fields import NonEmptyTokenIds, WireInput, WireOutput, refused
from mlx_parallm.server.api.training.schema import User

TrajectoryId = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
AnswerText = Annotated[str, Field(min_length=1)]


class PreferenceBody(WireInput):
    """An edited answer. With a rejected answer it is a preference; without one, the chosen answer is imitated.

    The prompt is given once: by the id of a trajectory, or as text, token ids or messages. Of two answers that the
    server has drawn it is known already.
    """

    trajectory_id: TrajectoryId | None = None
    """The answer that was edited: its prompt is taken."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """The prompt as text, encoded like that of `/v1/completions`."""
    prompt_token_ids: NonEmptyTokenIds | None = None
    """The prompt as token ids."""
    messages: Messages | None = None
    """The prompt as a conversation, rendered like that of `/v1/chat/completions`."""
    chosen: AnswerText | None = None
    """The better answer, as a whole text: the end-of-sequence token is added."""
    chosen_id: TrajectoryId | None = None
    """In place of `chosen`: the id of a trajectory."""
    rejected: AnswerText | None = None
    """The worse answer, as a whole text."""
    rejected_id: TrajectoryId | None = None
    """In place of `rejected`: the id of a trajectory, such as the one that was edited."""
    correction: AnswerText | None = None
    """What the answer should have been. It is imitated: the same as `chosen` without a rejected answer."""
    user: User | None = None
    """Who says so. The last edit of one user about one answer or prompt counts, as long as it waits."""
    lora_adapter: str | None = None
    """The adapter that learns from it. By default, the one that the named trajectories train, or else the default
    adapter."""

    @property
    def trajectories(self) -> dict[str, str]:
        """The trajectories that it names, by field."""
        named = {name: getattr(self, name) for name in ("trajectory_id", "chosen_id", "rejected_id")}
        return {name: value for name, value in named.items() if value is not None}

    @model_validator(mode="after")
    def _is_complete(self) -> PreferenceBody:
        self._one_of(("chosen", "chosen_id", "correction"), least=1)
        self._one_of(("rejected", "rejected_id"), least=0)
        if self.correction is not None and (self.rejected is not None or self.rejected_id is not None):
            raise refused("has no rejected answer; send chosen and rejected for a preference", "correction")
        known = self.chosen_id is not None or self.rejected_id is not None
        self._one_of(("trajectory_id", "prompt", "prompt_token_ids", "messages"), least=0 if known else 1)
        return self

    def _one_of(self, fields: tuple[str, ...], least: int) -> None:
        sent = [name for name in fields if getattr(self, name) is not None]
        if len(sent) > 1:
            raise refused(f"send this or {sent[0]}, and not both", sent[1])
        if len(sent) < least:
            raise refused(f"send one of {', '.join(fields)}", fields[0])


class PreferenceObject(WireOutput):
    """The edit that waits for an update. It is on the disk."""

    status: Literal["success"]
    edit_id: str
    """Its id. The edit is learnt from as the group of this id."""
    signal: Literal["preferences", "corrections"]
    """`preferences`: trained with dpo. `corrections`: imitated."""
    lora_adapter: str
    """The adapter that learns from it."""
    is_new: bool
    """False: the same edit waits already, and counts once."""
    waiting: int
    """Edits of this kind that wait for an update."""
    wanted: int
    """Edits of this kind that make an update."""


def preference_object(card: EditCard) -> PreferenceObject:
    return PreferenceObject.model_validate(
        {
            "status": "success",
            "edit_id": card.edit_id,
            "signal": card.signal.value,
            "lora_adapter": card.adapter,
            "is_new": card.is_new,
            "waiting": card.waiting,
            "wanted": card.wanted,
        }
    )
