"""Response objects of `/v1/training/trajectories`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mlx_parallm.core.adapters import AdapterText
from mlx_parallm.core.json_values import Figure, UnixTime
from mlx_parallm.rl.reading import EditedAnswer, GroupRow, Thumbs
from mlx_parallm.rl.trajectories import TrajectoryState
from mlx_parallm.server.api.fields import FinishReasonText, WireOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRowObject(GroupRow):
    """A group of trajectories in a list."""

    prompt: str
    """The beginning of its prompt; of a conversation, of the last message of the user."""
    created: UnixTime
    """Time of its first answer in ISO-8601, UTC."""


class GroupPageObject(WireOutput):
    """A page of a list of groups."""

    object: Literal["list"]
    data: list[GroupRowObject]
    """Newest first."""
    has_more: bool
    """Whether older ones follow. They come with the last `number` of this page as `after`."""


class TokenObject(WireOutput):
    """One token of an answer."""

    text: str
    """The text that it adds; empty while a character is incomplete. Special tokens are written out."""
    logprob: Figure | None
    """Log-probability in nats when it was drawn; null if that is unknown."""
    advantage: Figure | None
    """Its advantage in the last update that took the answer; null if there was none."""
    context: bool = False
    """It was not drawn and is not trained, such as the result of a tool."""


class CollectedTurnObject(WireOutput):
    """One answer; of an episode, one turn."""

    trajectory_id: str
    """Its id, for feedback and corrections."""
    lora_version: AdapterText | None
    """The version that drew it; null if it is unknown."""
    context: str
    """What came before the answer after the group's prompt or the turn before; cut at its beginning if it is long."""
    text: str
    """The answer without special tokens, as far as its tokens are shown."""
    tokens: list[TokenObject]
    """Its first tokens."""
    tokens_left_out: int
    """Tokens after these, which are not shown."""
    temperature: float
    """The temperature of sampling."""
    finish_reason: FinishReasonText | None
    """Why it ended; null if that is unknown."""
    thumbs_up: int
    """People whose last score for it is above 0."""
    thumbs_down: int
    """People whose last score for it is 0 or less."""
    edits: Sequence[EditedAnswer]
    """What people wrote in its place, oldest first."""


class CollectedSampleObject(WireOutput):
    """One answer of a group, or one episode."""

    reward: Figure | None
    """Its reward; null if it has none."""
    advantage: Figure | None
    """How much better than expected it was, in the last update that took it; null if none has."""
    fate: TrajectoryState
    """What became of it; as that of a group."""
    reason: str
    """Why it was dropped; empty if it was not."""
    thumbs: Thumbs
    """What feedback on it does now. `count`: it is a reward. `count_late`: the sample was dropped, and is learnt from
    as late feedback. `nothing`: it is refused, because the sample was trained on, its update was refused, or it is an
    edit."""
    turns: list[CollectedTurnObject]
    """Its answer; of an episode, the last of its answers, in order."""
    turns_left_out: int
    """Turns before these, which are not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedGroupObject(GroupRowObject):
    """A group of trajectories in full."""

    scoring_function: str | None
    """The scorer that rewards it; null if there is none."""
    full_prompt: str
    """The prompt as the model got it, with its special tokens; cut at its beginning if it is long."""
    prompt_tokens: int
    """Tokens of the prompt."""
    members: list[CollectedSampleObject]
    """Its first samples."""
