"""The body of the route that takes edits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from mlx_parallm.server.api.conversation import Messages
from mlx_parallm.server.api.fields import MAX_NAME, Name, NonEmptyTokenIds, WireInput, refused

TrajectoryId = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
AnswerText = Annotated[str, Field(min_length=1)]


class PreferenceBody(WireInput):
    """An edited answer. With a rejected answer it is a preference; without one, the chosen answer is imitated.

    The prompt is given once: by the id of a trajectory, or as text, token ids or messages. Of two answers that the
    server has sampled it is known already.
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
    user: Name | None = None
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
