"""What people say about answers: their opinions, their edits, and the report of what was learnt from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mlx_parallm.core.json_values import ANSWER


class Signal(StrEnum):
    """What a group teaches, and so the loss of its updates.

    REWARDS: its rewards, with the loss that is configured. LATE_FEEDBACK: opinions on an answer that had been dropped,
    with kto. PREFERENCES: a chosen answer and a rejected one, with dpo. CORRECTIONS: an answer to imitate, with
    cross_entropy. The losses of the last three need no answers of the newest version.
    """

    REWARDS = "rewards"
    LATE_FEEDBACK = "late_feedback"
    PREFERENCES = "preferences"
    CORRECTIONS = "corrections"


@dataclass(frozen=True, slots=True)
class FeedbackCard:
    """What became of a score. `reward`: the mean of the last scores of all `people`. `late`: the answer had been
    dropped, and is learnt from as late feedback."""

    reward: float
    people: int
    late: bool = False


@dataclass(frozen=True, slots=True)
class FoundTrajectory:
    """An answer that was collected, in any state. `adapter`: the name of the adapter that it trains."""

    adapter: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str


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
    def signal(self) -> Signal:
        return Signal.PREFERENCES if self.rejected_ids else Signal.CORRECTIONS


@dataclass(frozen=True, slots=True)
class EditCard:
    """An edit that waits for an update. `waiting`: edits of this signal that do; `wanted`: those that make an update.
    `is_new` is False if it had been sent before and waits already."""

    edit_id: str
    signal: Signal
    adapter: str
    waiting: int
    wanted: int
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What was learnt from one source."""

    __pydantic_config__ = ANSWER

    source: str
    """`scorers`; `environments`, which reward what they draw; `feedback` in time; `late_feedback`; `preferences`;
    `corrections`; or `unrated`: answers that wait, or waited, for feedback."""
    arrived: int = 0
    """Answers, episodes or edits that came. A preference counts as two answers."""
    waiting: int = 0
    """Those that wait for a reward or an update."""
    trained: int = 0
    """Those that were trained on."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Those that were not, by reason."""
    updates: int = 0
    """Updates that trained on some of them."""
    gradient_share: float = 0.0
    """Its part of the gradient norms of all these updates, 0 to 1. In an update of several sources, each counts by the
    number of its answers."""
    reward_change: float | None = None
    """The changes of the mean reward after its updates, summed. If several sources had updates between two
    measurements, each gets a part by its number of answers. null: none was measured."""
    evaluation_change: float | None = None
    """The same of the evaluations."""


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
