"""Turns the engine's events into an answer: one JSON body, or the chunks of a stream.

`AnswerWriter` is what `GenerationResponse` needs of every route. `AnswerObject` and `ChoiceWriter` are the part that
completions and chat share: both answer with choices, and send usage and trajectory ids in the same places.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Generic, TypeVar

from pydantic_core import from_json

from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import (
    Event,
    FinishReason,
    GenerationRequest,
    PromptScored,
    RequestFinished,
    SequenceOutput,
    TokenLogprob,
)
from mlx_parallm.core.splitter import AnswerPart, Splitter
from mlx_parallm.core.text import RepairKind, TextTokenizer
from mlx_parallm.server.api.bodies import GenerationBody
from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.api.logprobs import ScoredToken
from mlx_parallm.server.errors import error_body
from mlx_parallm.server.streams import OPENAI_EVENTS, Framing

Body = TypeVar("Body", bound=GenerationBody)
Whole = TypeVar("Whole")
Sent = TypeVar("Sent")


class PromptTokensDetails(WireOutput):
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Prompt tokens whose keys and values were taken from the prefix cache and not computed."""


class Usage(WireOutput):
    """The number of tokens in a request and its answer."""

    prompt_tokens: int
    """Tokens of all prompts."""
    completion_tokens: int
    """Tokens generated for all choices."""
    total_tokens: int
    """The sum of both."""
    prompt_tokens_details: PromptTokensDetails | None = None
    """How many of the prompts' tokens were cached."""


class RepairedCall(WireOutput):
    """A tool call that was not valid in the form of the model's family, and could only mean one thing."""

    position: int
    """The call's position in the answer."""
    kind: RepairKind
    """What was wrong: `form`, it was in another family's form; `end`, its end was missing, or a bracket was closed
    twice; `quotes`, a quote, a comma or a line break made its JSON invalid; `fence`, it was in a fenced block."""


class AnswerObject(WireOutput):
    """A whole answer, or one chunk of a stream. Subclasses declare the types of `object` and `choices`."""

    id: str
    """The id in the header x-request-id of the answer; if the client chose it, after a word for the route."""
    object: str
    """The kind of this object."""
    created: int
    """Unix time in seconds."""
    model: str
    """The served model, or the adapter's name."""
    choices: list[Any]
    """All answers; in a chunk of a stream, the one that the chunk adds to, or none."""
    usage: Usage | None = None
    """Numbers of tokens. In a stream, `stream_options` decides which chunks have them."""
    metadata: dict[str, str] | None = None
    """The request's metadata; absent with `collect_trajectory`."""
    lora_adapter: str | None = None
    """`name@version` of the adapter; absent for the base."""
    trajectory_ids: list[str] | None = None
    """One id for each choice, with `collect_trajectory`; in a stream, in the chunk with the last `finish_reason`."""
    trajectory_warning: str | None = None
    """Why the trajectories will not be used for training, for example because a stale version sampled them."""


Watch = Callable[[AsyncIterator[Event]], AsyncIterator[Event]]
"""Passes the events of a request through, and keeps what it needs of them."""


@dataclass(kw_only=True, eq=False)
class AnswerWriter(ABC):
    """Writes the answer to one request. Used once: either `opening_chunks` and then `chunks` for each event in order,
    or `whole` for all events together.

    `watch`: sees the events before they are written; None: nothing does. `chosen_id`: the id that the client chose for
    the request, if it did.
    """

    FRAMING: ClassVar[Framing] = OPENAI_EVENTS
    """The form of a stream."""

    request: GenerationRequest
    watch: Watch | None = None
    chosen_id: str = field(default="", init=False)

    def opening_chunks(self) -> Iterator[WireOutput]:
        """The chunks of a stream that are sent before the engine's first event."""
        return iter(())

    def chunks(self, event: Event) -> Iterator[WireOutput]:
        """The chunks for one event; none if it adds nothing that a client sees, or if no stream can be asked for."""
        return iter(())

    @abstractmethod
    def whole(self, events: Sequence[Event]) -> WireOutput:
        """The JSON body for all events of a request. The last one is its RequestFinished."""

    def keep_alive(self) -> WireOutput | None:
        """The event to send when the stream has been silent for long. None: a comment is sent, if the form has any."""
        return None

    def failed(self, error: Exception) -> WireOutput:
        """The chunk that ends a stream whose request failed after the status line was sent."""
        return error_body(error)

    @property
    def identity(self) -> dict[str, Any]:
        """The fields `id`, `model` and `lora_adapter` of an answer that is not kept, so that its id may end with one
        that the client chose. As vLLM does, `chatcmpl-` or the like comes before that."""
        own = self.request.request_id
        answer_id = f"{own.partition('-')[0]}-{self.chosen_id}" if self.chosen_id else own
        return {"id": answer_id, **served_by(self.request)}


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """A part of choice `index`: the output of one step, an echoed prompt, or several parts joined.

    `token_ids` are generated tokens; `scored` may also have the tokens of an echoed prompt. `parts` is what a chat's
    splitter returned for the text: the splitter may hold text back, or release text of earlier pieces.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    scored: tuple[ScoredToken, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    parts: tuple[AnswerPart, ...] = ()

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Those of `scored` that a token has; of a generated text, all tokens have one."""
        return [token.logprob for token in self.scored if token.logprob is not None]


def pieces_of(event: Event) -> Iterator[ChoicePiece]:
    """What an event adds to a choice: one piece, or none."""
    if isinstance(event, SequenceOutput):
        scored = tuple(ScoredToken(logprob.token_id, logprob) for logprob in event.logprobs)
        yield ChoicePiece(event.index, event.text, event.token_ids, scored, event.finish_reason, event.stop_reason)


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """All that an answer is written from. `scored` has the prompt logprobs by the index of the prompt."""

    choices: list[ChoicePiece]
    scored: dict[int, PromptScored]
    finished: RequestFinished


def whole_answer(
    request: GenerationRequest, events: Sequence[Event], pieces: Iterable[ChoicePiece] | None = None
) -> WholeAnswer:
    """Joins the pieces of each choice, which are those of the events if they are not given. `events` are all events of
    the request; the last one is its RequestFinished."""
    finished = events[-1]
    assert isinstance(finished, RequestFinished)
    pieces = chain.from_iterable(map(pieces_of, events)) if pieces is None else pieces
    own: list[list[ChoicePiece]] = [[] for _ in range(request.sequences)]
    for piece in pieces:
        own[piece.index].append(piece)
    scored = {event.prompt_index: event for event in events if isinstance(event, PromptScored)}
    return WholeAnswer([_joined(index, each) for index, each in enumerate(own)], scored, finished)


def _joined(index: int, pieces: Sequence[ChoicePiece]) -> ChoicePiece:
    """A whole choice. Its last piece has the reason why it ended."""
    return ChoicePiece(
        index,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        scored=tuple(token for piece in pieces for token in piece.scored),
        finish_reason=pieces[-1].finish_reason,
        stop_reason=pieces[-1].stop_reason,
        parts=tuple(part for piece in pieces for part in piece.parts),
    )


@dataclass(kw_only=True, eq=False)
class ChoiceWriter(AnswerWriter, Generic[Body]):
    """Decides when chunks are sent, and writes the fields around the choices. Subclasses write the choices.

    `tokens_as_ids`: tokens in logprobs are written as `token_id:<id>`. `created` is Unix time in seconds.
    """

    body: Body
    tokenizer: TextTokenizer
    tokens_as_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set, init=False)
    _ended: int = field(default=0, init=False)
    _last_piece: ChoicePiece | None = field(default=None, init=False)
    _completion_tokens: int = field(default=0, init=False)

    def opening_chunks(self) -> Iterator[WireOutput]:
        return (self._chunk([piece], self._chunk_fields()) for piece in self._opening_pieces())

    def chunks(self, event: Event) -> Iterator[WireOutput]:
        for piece in self._pieces(event):
            self._completion_tokens += len(piece.token_ids)
            self._ended += piece.finish_reason is not None
            if self.request.collection is not None and self._ended == self.request.sequences:
                self._last_piece = piece  # its chunk has the ids of the trajectories, which come with RequestFinished
            elif self._is_visible(piece):
                yield self._chunk([piece], self._chunk_fields())
        if isinstance(event, RequestFinished):
            yield from self._closing_chunks(event)

    def _closing_chunks(self, finished: RequestFinished) -> Iterator[WireOutput]:
        if self._last_piece is not None:
            yield self._chunk([self._last_piece], self._chunk_fields() | collected_fields(self.request, finished))
        if self.body.stream_options.include_usage:
            yield self._chunk([], self._fields() | {"usage": usage_of(finished)})

    def whole(self, events: Sequence[Event]) -> WireOutput:
        whole = whole_answer(self.request, events, chain(self._opening_pieces(), *map(self._pieces, events)))
        fields = {**self._fields(), "usage": usage_of(whole.finished), **collected_fields(self.request, whole.finished)}
        return self._whole(whole.choices, whole.scored, fields)

    def _opening_pieces(self) -> Iterator[ChoicePiece]:
        return iter(())

    def _pieces(self, event: Event) -> Iterator[ChoicePiece]:
        return pieces_of(event)

    def _is_visible(self, piece: ChoicePiece) -> bool:
        ids = self.body.return_token_ids and piece.token_ids
        return bool(piece.text or piece.scored or piece.finish_reason or ids)

    def _begins(self, piece: ChoicePiece) -> bool:
        """Whether this is the first call for the piece's choice."""
        if piece.index in self._begun:
            return False
        self._begun.add(piece.index)
        return True

    def _fields(self) -> dict[str, Any]:
        """The fields of the whole answer and of every chunk, except `object` and `choices`."""
        fields = {**self.identity, "created": self.created}
        # The metadata of a collected request is for its scorer and may be long: it is not returned.
        if self.body.metadata is not None and not self.body.collect_trajectory:
            fields["metadata"] = self.body.metadata
        return fields

    def _chunk_fields(self) -> dict[str, Any]:
        """The fields of a chunk with choices. Its usage is absent, null or the counts so far, as `stream_options`
        asks."""
        options = self.body.stream_options
        if not options.include_usage:
            return self._fields()
        if not options.continuous_usage_stats:
            return self._fields() | {"usage": None}
        return self._fields() | {"usage": token_usage(sum(map(len, self.request.prompts)), self._completion_tokens)}

    @abstractmethod
    def _chunk(self, pieces: Sequence[ChoicePiece], fields: dict[str, Any]) -> WireOutput:
        """One event of the stream. It has one piece, or none in the last event, which has the usage."""

    @abstractmethod
    def _whole(
        self, choices: Sequence[ChoicePiece], scored: dict[int, PromptScored], fields: dict[str, Any]
    ) -> WireOutput:
        """The JSON body. `scored` has the prompt logprobs by the index of the prompt."""


def served_by(request: GenerationRequest) -> dict[str, Any]:
    """The answer's fields that name the base model, or the adapter that served the request."""
    if request.adapter == BASE_ADAPTER:
        return {"model": request.base}
    return {"model": request.adapter.name, **version_of(request)}


def version_of(request: GenerationRequest) -> dict[str, Any]:
    """The answer's field that names the version which served the request; none for the base model."""
    return {} if request.adapter == BASE_ADAPTER else {"lora_adapter": str(request.adapter)}


def collected_fields(request: GenerationRequest, finished: RequestFinished) -> dict[str, Any]:
    """The answer's fields about its trajectories; none if the request was not collected."""
    if request.collection is None:
        return {}
    warning = {"trajectory_warning": finished.trajectory_warning} if finished.trajectory_warning else {}
    return {"trajectory_ids": list(finished.trajectory_ids), **warning}


def ending(piece: ChoicePiece) -> dict[str, Any]:
    """The field `finish_reason`, and `stop_reason` if a stop string or a token of `stop_token_ids` ended the text."""
    reason = {"finish_reason": piece.finish_reason.value if piece.finish_reason else None}
    return reason if piece.stop_reason is None else {**reason, "stop_reason": piece.stop_reason}


def cut_off(last: ChoicePiece | SequenceOutput) -> bool:
    """Whether the server ended the text, for example at a stop string or the token limit, and not the model."""
    return last.finish_reason not in (None, FinishReason.STOP) or isinstance(last.stop_reason, str)


def parts_of(splitter: Splitter, output: ChoicePiece | SequenceOutput) -> Iterator[AnswerPart]:
    """What an output adds to the parts of an answer, whose own `splitter` has seen its outputs so far."""
    yield from splitter.feed(output.text)
    if output.finish_reason is not None:
        yield from splitter.end(cut_off(output))


def text_of(part: AnswerPart) -> str:
    """What a part adds to a text, to reasoning, or to the JSON text of a call's arguments."""
    return part.reasoning or part.text if part.call is None else part.call.arguments


class Section(ABC, Generic[Whole, Sent]):
    """What a client gets as one object, made of consecutive parts of an answer: a text, reasoning, or one call.

    `index`: its place in the answer. `first`: the first part, which for a call has the id and the name.
    """

    def __init__(self, index: int, first: AnswerPart) -> None:
        self.index = index
        self.first = first
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All that was added."""
        return "".join(self._texts)

    def takes(self, part: AnswerPart) -> bool:
        """Whether the part belongs to this section."""
        return self._kind(part) == self._kind(self.first)

    @staticmethod
    def _kind(part: AnswerPart) -> tuple[int | None, bool]:
        return None if part.call is None else part.call.position, bool(part.reasoning)

    @abstractmethod
    def begin(self) -> Iterator[Sent]:
        """The events that come before the first part."""

    @abstractmethod
    def extend(self, part: AnswerPart) -> Iterator[Sent]:
        """Adds a part that belongs to this section."""

    @abstractmethod
    def end(self, cut: bool) -> Iterator[Sent]:
        """The events that come after the last part. `cut`: the answer was cut off there."""

    @abstractmethod
    def whole(self, cut: bool) -> Whole:
        """The object as it is at the end."""


class Sections(Generic[Whole, Sent]):
    """The sections of one answer: those that are `done`, and the open one. A part that does not belong to it ends it.

    `opened`: makes a section of its index and its first part.
    """

    def __init__(self, opened: Callable[[int, AnswerPart], Section[Whole, Sent]]) -> None:
        self.done: list[Whole] = []
        self._opened = opened
        self._open: Section[Whole, Sent] | None = None

    def add(self, part: AnswerPart) -> Iterator[Sent]:
        """Adds the next part of the answer."""
        if self._open is None or not self._open.takes(part):
            yield from self._close(cut=False)
            self._open = self._opened(len(self.done), part)
            yield from self._open.begin()
        yield from self._open.extend(part)

    def end(self, cut: bool) -> Iterator[Sent]:
        """Ends the answer. One without a section gets an empty text. `cut`: the answer was cut off."""
        yield from self._close(cut)
        if not self.done:
            yield from self.add(AnswerPart())
            yield from self._close(cut)

    def _close(self, cut: bool) -> Iterator[Sent]:
        if self._open is not None:
            yield from self._open.end(cut)
            self.done.append(self._open.whole(cut))
            self._open = None


def repaired_fields(splitter: Splitter) -> dict[str, Any]:
    """The answer's field that names the repaired calls; none if no call was repaired."""
    repaired = [RepairedCall(position=position, kind=kind) for position, kind in splitter.repaired]
    return {"repaired_tool_calls": repaired} if repaired else {}


def repetition_fields(reason: FinishReason | None) -> dict[str, Any]:
    """The field `finish_reason` of an answer in a protocol that has no word for `repetition`, if that is the reason."""
    return {"finish_reason": reason.value} if reason is FinishReason.REPETITION else {}


def call_arguments(text: str) -> dict[str, Any]:
    """The arguments of a tool call as an object. Of those that were cut off, it has what is complete, as Anthropic's
    SDK does."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def token_usage(prompt_tokens: int, completion_tokens: int, **more: Any) -> Usage:
    """The usage of so many tokens."""
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=total, **more)


def usage_of(finished: RequestFinished) -> Usage:
    """The numbers of tokens of a request that has finished."""
    details = PromptTokensDetails(cached_tokens=finished.cached_tokens)
    return token_usage(finished.prompt_tokens, finished.completion_tokens, prompt_tokens_details=details)
