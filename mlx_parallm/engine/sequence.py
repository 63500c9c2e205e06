"""Sequence: one choice of a request while the engine computes it, with all of its state."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from mlx_parallm.batch.sampling import RowSampling
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.candidates import TOP_LOGPROBS
from mlx_parallm.core.requests import Pooling, SamplingParams, TokenLogprob, WorkClass
from mlx_parallm.kv.row import KVRow

if TYPE_CHECKING:
    from mlx_parallm.batch.runner import Vector
    from mlx_parallm.engine.requests import Request
    from mlx_parallm.engine.speculate import Drafter
    from mlx_parallm.engine.text import TextStream


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


@dataclass(eq=False, kw_only=True)
class Sequence(KVRow):
    """The state of one sequence. Only the device thread changes it.

    A token is sampled when the unit that samples it is launched, and read when its id has reached the host. The next
    unit may be launched before the last one is read.

    Attributes:
        tokens: the prompt and every sampled token that has been read.
        arrived_at: when the request arrived. This and the times below are seconds on `time.monotonic`'s clock.
        key: the name of the API key that asked for it.
        scored: logprobs of its prompt are wanted, so its chunks keep logits and share no unit with other chunks.
        scored_from: the first token of a scored prompt whose logprob is wanted; at least 1.
        prompt_candidates: the candidates that are reported for each token of a scored prompt.
        candidates: those that are reported for each sampled token.
        pooling: how its hidden states are pooled. The vector takes the place of the only token that it could sample.

    The scheduler's:
        sampled: tokens sampled so far, including those not read yet.
        started_at: when the first unit of work for the sequence was launched; 0.0 before.
        served_at: when it last got a chunk in its turn; before the first chunk, `arrived_at`.
        keeps_row_until: the number of sampled tokens below which its row is not taken for another key's share.
        steps_waited: steps that were launched since its last chunk, while it is being prefilled.
        drafted: the number of draft tokens that the next unit computes and checks. They count as sampled and computed
            from its launch until it is read, as if all of them were right.

    That of the memory of rows:
        kept_blocks: how many full blocks it had when they were last registered in the prefix cache.

    Those of speculation:
        drafter: where its drafts come from; None until the first one.
        proposed: the tokens that may follow the last one, as they are proposed without the base model; see `speculate`.
        acceptance: the share of tokens like those of `proposed` that were right lately.
        model_acceptance: the same of drafts of the draft model; 0.0 if it makes none for this sequence now.
        ahead: the tokens that its drafts have given it, less the steps by which drafts, of any sequence, have made its
            units longer. Where it would be far below zero, the sequence would end later than without speculation.

    Those of sampling:
        sampling: its options.
        draft_sampling: the options after each token of the draft that the next pass computes.

    Those of the answer, set by the request that it belongs to; a sequence that is only timed has none of them:
        request, index: its request, and the number of the choice.
        text: turns its tokens into text, and finds where that ends.
        scores: the prompt's logprobs so far, None for the tokens that are not scored. The list itself is None if the
            request does not want them or they have been sent.
        pooled: the pooled hidden states of the prompt as far as it is computed; for the mean, their sum.
        counts_lookup: tokens that the row gets from the prefix cache count as hits. False if the prompt was looked up
            before, for another sequence or before a preemption.
    """

    tokens: list[int]
    max_tokens: int
    arrived_at: float
    group: PromptGroup
    work_class: WorkClass = WorkClass.INFERENCE
    adapter: AdapterRef = BASE_ADAPTER
    priority: int = 0
    key: str = ""
    scored: bool = False
    scored_from: int = 1
    prompt_candidates: int = 0
    candidates: int = 0
    pooling: Pooling | None = None
    prompt_length: int = field(init=False, repr=False)

    status: SequenceStatus = SequenceStatus.WAITING
    sampled: int = 0
    started_at: float = 0.0
    served_at: float = field(init=False, repr=False)
    steps_waited: int = 0
    keeps_row_until: int = 0
    drafted: int = 0

    kept_blocks: int = 0

    drafter: Drafter | None = None
    proposed: Seq[int] = ()
    acceptance: float = 0.0
    model_acceptance: float = 0.0
    ahead: float = 0.0

    sampling: RowSampling = field(default_factory=lambda: RowSampling(SamplingParams()))
    draft_sampling: Seq[RowSampling] = ()

    request: Request = field(init=False, repr=False)
    index: int = field(init=False, repr=False)
    text: TextStream = field(init=False, repr=False)
    scores: list[TokenLogprob | None] | None = None
    pooled: Vector | None = None
    counts_lookup: bool = False

    def __post_init__(self) -> None:
        self.served_at = self.arrived_at
        self.prompt_length = len(self.tokens)
        self.group.members.append(self)

    # -- counts ----------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of the prompt and tokens sampled so far."""
        return self.prompt_length + self.sampled

    @property
    def pending(self) -> int:
        """Tokens of the prompt and sampled tokens whose keys and values are not in the row; at least one. A row with
        exactly one decodes: computing it gives the logits of the next token."""
        return self.length - self.computed

    @property
    def to_compute(self) -> int:
        """Pending tokens that a unit has to compute. The last one is among them only if a token is sampled from it."""
        return self.pending if self.may_sample else self.pending - 1

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
    def samples_alone(self) -> bool:
        """Whether no other such row may sample in the same unit, because each reports so many candidates that they take
        longer than the row's part of the forward pass."""
        return self.candidates > TOP_LOGPROBS

    @property
    def unread(self) -> int:
        """Tokens sampled and not read yet."""
        return self.length - len(self.tokens)

    @property
    def may_sample(self) -> bool:
        """Whether another token may be sampled before `max_tokens` is reached."""
        return self.sampled < self.max_tokens

    def advance(self, tokens: int) -> None:
        """Counts `tokens` more computed tokens of a sequence that holds a row. It runs when only one is pending."""
        self.computed += tokens
        pending = self.prompt_length + self.sampled - self.computed
        self.status = SequenceStatus.PREFILLING if pending > 1 else SequenceStatus.RUNNING

    # -- drafts ----------------------------------------------------------------------------------

    @property
    def draft(self) -> Seq[int]:
        """The proposed tokens that the next unit computes after the last token."""
        return self.proposed[: self.drafted]

    def take_back(self, tokens: int) -> None:
        """Uncounts so many tokens at the end, which were drafted. Their keys and values may be written over."""
        self.sampled -= tokens
        self.computed -= tokens

    def keep_drafted(self) -> None:
        """Counts a token of the draft again, because it was right, and with it the token that was sampled after it."""
        self.sampled += 1
        self.computed += 1
        self.ahead += 1.0

    def forget_unread(self) -> None:
        """Takes back tokens that were sampled but will never be read, so that they are sampled again.

        Token counts for penalties are rebuilt from the tokens that were read, because the counts on the device may be
        lost.
        """
        self.sampled -= self.unread
        self.drafted, self.draft_sampling = 0, ()
        self.count_again()

    # -- sampling --------------------------------------------------------------------------------

    def drop_free_grammar(self) -> None:
        """Lets the row be sampled without its grammar once that allows any text."""
        if (grammar := self.sampling.grammar) is not None and grammar.free:
            self.sampling, self.text.grammar = self.sampling.without_grammar(), None

    def count_again(self) -> None:
        """Counts the tokens for penalties again, from those that were read."""
        if self.sampling.counts is not None:
            prompt, generated = self.tokens[: self.prompt_length], self.tokens[self.prompt_length :]
            self.sampling = self.sampling.counting(prompt, generated)
