"""A sequence as the scheduler sees it: counts, classes and times. Never a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mlx_parallm.core import BASE_ADAPTER, AdapterRef, WorkClass


class Status(Enum):
    """WAITING holds no row; PREFILLING and RUNNING hold one; FINISHED never comes back."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Group:
    """The n sequences of one prompt. The first one prefills; the others fork its row."""

    members: list[Sequence] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Sequence:
    """One row's worth of work.

    `tokens` is the prompt and every drawn token that has been read back. Drawing runs ahead of
    reading: `drawn` counts draws launched, so `drawn - (len(tokens) - prompt_length)` are in flight.
    `computed` counts tokens whose keys and values are in the row. A row may decode when exactly one
    token is not computed: the next step's input. `started_at` is when the device began its first
    unit of work for it, 0.0 before. `served_at` is when it last got a prefill unit in its turn (at first, when it
    arrived); `steps_waited` counts the decode steps since any unit of prefill, while it is being prefilled. `scored`:
    its prompt's logprobs are wanted, so its prefill units keep logits and are its own.
    """

    sequence_id: int
    tokens: list[int]
    max_tokens: int
    arrived_at: float
    group: Group
    work_class: WorkClass = WorkClass.INFERENCE
    adapter: AdapterRef = BASE_ADAPTER
    priority: int = 0
    status: Status = Status.WAITING
    computed: int = 0
    drawn: int = 0
    started_at: float = 0.0
    scored: bool = False
    served_at: float = 0.0
    steps_waited: int = 0
    prompt_length: int = 0

    def __post_init__(self) -> None:
        self.served_at = self.arrived_at
        self.prompt_length = len(self.tokens)
        self.group.members.append(self)

    @property
    def length(self) -> int:
        """Prompt tokens and launched draws."""
        return self.prompt_length + self.drawn

    @property
    def to_prefill(self) -> int:
        """Tokens still to compute before the row may decode; the last token is decode's input."""
        return max(0, self.length - 1 - self.computed)

    @property
    def unread(self) -> int:
        """Draws launched and not read back yet."""
        return self.length - len(self.tokens)

    @property
    def wants_draw(self) -> bool:
        return self.drawn < self.max_tokens

    def leader(self) -> Sequence:
        return self.group.members[0]
