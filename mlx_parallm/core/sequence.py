"""One row of a batch as the scheduler sees it: token counts, classes and times, but no arrays."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.candidates import TOP_LOGPROBS
from mlx_parallm.core.requests import Pooling, WorkClass


class SequenceStatus(Enum):
    """WAITING sequences hold no row; PREFILLING and RUNNING ones hold one; FINISHED is final."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class PromptGroup:
    """The n sequences of one prompt. The first one computes it; the others share its keys and values.

    `awaits_prefix`: they get no rows yet, because the beginning of the prompt is being read from the disk.
    """

    members: list[Sequence] = field(default_factory=list)
    awaits_prefix: bool = False


@dataclass(eq=False)
class Sequence:
    """The state of one sequence. Only the device thread changes it.

    This part is what the scheduler needs. `batch.runner.Row` adds the row of the KV pool, and
    `engine.live.LiveSequence` the request and the text; all are one object.

    A token is drawn when the unit that draws it is launched, and read when its id has reached the host. The next unit
    may be launched before the last one is read.

    Attributes:
        tokens: the prompt and every drawn token that has been read.
        drawn: tokens drawn so far, including those not read yet.
        computed: tokens whose keys and values are in the row; the length of the row.
        cuts: token counts at which a chunk has to end, because the row's recurrent state is kept there.
        arrived_at: when the request arrived. This and the times below are seconds on `time.monotonic`'s clock.
        started_at: when the first unit of work for the sequence was launched; 0.0 before.
        served_at: when it last got a chunk in its turn; before the first chunk, `arrived_at`.
        keeps_row_until: the number of drawn tokens below which its row is not taken for another key's share.
        steps_waited: steps that were launched since its last chunk, while it is being prefilled.
        key: the name of the API key that asked for it.
        scored: logprobs of its prompt are wanted, so its chunks keep logits and share no unit with other chunks.
        scored_from: the first token of a scored prompt whose logprob is wanted; at least 1.
        prompt_candidates: the candidates that are reported for each token of a scored prompt.
        candidates: those that are reported for each drawn token.
        pooling: how its hidden states are pooled. The vector takes the place of the only token that it could draw.
        guess: the tokens that may follow the last one, as they are guessed without the base model; see
            `engine.speculation.drafting`.
        drafted: the number of guessed tokens that the next unit computes and checks. They count as drawn and computed
            from its launch until it is read, as if all of them were right.
        acceptance: the share of tokens like those of `guess` that were right lately.
        model_acceptance: the same of guesses of the draft model; 0.0 if it cannot guess for this sequence now.
    """

    sequence_id: int
    tokens: list[int]
    max_tokens: int
    arrived_at: float
    group: PromptGroup
    work_class: WorkClass = WorkClass.INFERENCE
    adapter: AdapterRef = BASE_ADAPTER
    priority: int = 0
    key: str = ""
    status: SequenceStatus = SequenceStatus.WAITING
    computed: int = 0
    cuts: Seq[int] = ()
    drawn: int = 0
    started_at: float = 0.0
    scored: bool = False
    scored_from: int = 1
    prompt_candidates: int = 0
    candidates: int = 0
    pooling: Pooling | None = None
    served_at: float = 0.0
    steps_waited: int = 0
    keeps_row_until: int = 0
    prompt_length: int = 0
    guess: Seq[int] = ()
    drafted: int = 0
    acceptance: float = 0.0
    model_acceptance: float = 0.0

    def __post_init__(self) -> None:
        self.served_at = self.arrived_at
        self.prompt_length = len(self.tokens)
        self.group.members.append(self)

    @property
    def length(self) -> int:
        """Tokens of the prompt and tokens drawn so far."""
        return self.prompt_length + self.drawn

    @property
    def pending(self) -> int:
        """Tokens of the prompt and drawn tokens whose keys and values are not in the row; at least one. A row with
        exactly one decodes: computing it gives the logits of the next token."""
        return self.length - self.computed

    @property
    def to_compute(self) -> int:
        """Pending tokens that a unit has to compute. The last one is among them only if a token is drawn from it."""
        return self.pending if self.may_draw else self.pending - 1

    @property
    def longest_chunk(self) -> int:
        """The most tokens that a unit may compute: those to compute, up to the next cut."""
        return min([self.to_compute, *(cut - self.computed for cut in self.cuts if cut > self.computed)])

    @property
    def prefix_ids(self) -> Seq[int]:
        """The tokens that are looked up in the prefix cache, which leaves at least the last of them to compute. Tokens
        whose logits or hidden states are wanted are not before it: keys and values are cached, and these are not."""
        if self.pooling is Pooling.MEAN:
            return ()
        return self.tokens[: self.scored_from] if self.scored else self.tokens

    @property
    def draws_alone(self) -> bool:
        """Whether no other such row may draw in the same unit, because each reports so many candidates that they take
        longer than the row's part of the forward pass."""
        return self.candidates > TOP_LOGPROBS

    @property
    def unread(self) -> int:
        """Tokens drawn and not read yet."""
        return self.length - len(self.tokens)

    @property
    def draft(self) -> Seq[int]:
        """The guessed tokens that the next unit computes after the last token."""
        return self.guess[: self.drafted]

    @property
    def may_draw(self) -> bool:
        """Whether another token may be drawn before `max_tokens` is reached."""
        return self.drawn < self.max_tokens

    def take_back(self, tokens: int) -> None:
        """Uncounts so many tokens at the end, which were guessed. Their keys and values may be written over."""
        self.drawn -= tokens
        self.computed -= tokens

    def take_guessed(self) -> None:
        """Counts a guessed token again, because it was right, and with it the token that was drawn after it."""
        self.drawn += 1
        self.computed += 1

    def forget_unread(self) -> None:
        """Takes back tokens that were drawn but will never be read, so that they are drawn again."""
        self.drawn -= self.unread
        self.drafted = 0
