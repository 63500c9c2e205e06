"""One row of a batch as the scheduler sees it: token counts, classes and times, but no arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import WorkClass


class SequenceStatus(Enum):
    """WAITING sequences hold no row; PREFILLING and RUNNING ones hold one; FINISHED is final."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class PromptGroup:
    """The n sequences of one prompt. The first one is prefilled; the others start as copies of its row."""

    members: list[SequenceState] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class SequenceState:
    """The state of one sequence. Only the device thread changes it.

    A token is drawn when the decode step that draws it is launched, and read when its id has reached the host. The
    next step is launched before the last one is read.

    Attributes:
        tokens: the prompt and every drawn token that has been read.
        drawn: tokens drawn so far, including those not read yet.
        computed: tokens whose keys and values are in the row. A row may decode when exactly one token is not
            computed: the next step's input.
        arrived_at: when the request arrived. This and the times below are seconds on `time.monotonic`'s clock.
        started_at: when the device began its first unit of work for the sequence; 0.0 before.
        served_at: when it last got a prefill chunk in its turn; before the first chunk, `arrived_at`.
        steps_waited: decode steps since its last prefill chunk, while it is being prefilled.
        scored: the logprobs of its prompt are wanted, so its prefill units keep logits and hold no other prompt.
    """

    sequence_id: int
    tokens: list[int]
    max_tokens: int
    arrived_at: float
    group: PromptGroup
    work_class: WorkClass = WorkClass.INFERENCE
    adapter: AdapterRef = BASE_ADAPTER
    priority: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
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
        """Tokens of the prompt and tokens drawn so far."""
        return self.prompt_length + self.drawn

    @property
    def to_prefill(self) -> int:
        """Tokens to compute before the row may decode. The last token is not among them: the next step computes it."""
        return max(0, self.prompt_length + self.drawn - 1 - self.computed)

    @property
    def unread(self) -> int:
        """Tokens drawn and not read yet."""
        return self.prompt_length + self.drawn - len(self.tokens)

    @property
    def may_draw(self) -> bool:
        """Whether another token may be drawn before `max_tokens` is reached."""
        return self.drawn < self.max_tokens
