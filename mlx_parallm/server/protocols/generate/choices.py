"""What the answers of all forms are made of: the whole choices of a request."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from mlx_parallm.core import (
    Event,
    FinishReason,
    GenerationRequest,
    PromptScored,
    RequestFinished,
    SequenceOutput,
    TextTokenizer,
    TokenLogprob,
)
from mlx_parallm.server.api.answer import AnswerWriter, Watch
from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.protocols.generate.schema import GenerateBody


@dataclass(frozen=True, slots=True)
class WholeChoice:
    """One answer. `prompt`: the index of its prompt. `logprobs`: one for each of `token_ids`, if the request asked for
    them."""

    prompt: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class WholeRequest:
    """All answers of a request, in order, and the scores of its prompts, if it asked for them."""

    choices: list[WholeChoice]
    prompt_logprobs: dict[int, tuple[TokenLogprob | None, ...]]
    finished: RequestFinished


def whole_request(request: GenerationRequest, events: Sequence[Event]) -> WholeRequest:
    """Joins the events of a request. The last one is its RequestFinished."""
    finished = events[-1]
    assert isinstance(finished, RequestFinished)
    outputs: list[list[SequenceOutput]] = [[] for _ in range(request.sequences)]
    for event in events:
        if isinstance(event, SequenceOutput):
            outputs[event.index].append(event)
    scored = {event.prompt_index: event.logprobs for event in events if isinstance(event, PromptScored)}
    return WholeRequest([_joined(index // request.n, own) for index, own in enumerate(outputs)], scored, finished)


def _joined(prompt: int, outputs: Sequence[SequenceOutput]) -> WholeChoice:
    last = outputs[-1]
    assert last.finish_reason is not None
    return WholeChoice(
        prompt=prompt,
        text="".join(output.text for output in outputs),
        token_ids=list(chain.from_iterable(output.token_ids for output in outputs)),
        logprobs=list(chain.from_iterable(output.logprobs for output in outputs)),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


@dataclass(kw_only=True, eq=False)
class WholeWriter(AnswerWriter):
    """Writes the answer to a body that cannot ask for a stream."""

    sent: GenerateBody
    request: GenerationRequest
    tokenizer: TextTokenizer
    watch: Watch | None = field(default=None, init=False)

    def opening_chunks(self) -> Iterator[WireOutput]:
        return iter(())

    def chunks(self, event: Event) -> Iterator[WireOutput]:
        return iter(())

    def whole(self, events: Sequence[Event]) -> WireOutput:
        return self._answer(whole_request(self.request, events))

    @abstractmethod
    def _answer(self, whole: WholeRequest) -> WireOutput:
        """The JSON body."""
