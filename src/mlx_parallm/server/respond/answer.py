"""How an endpoint words the engine's events: the part that completions and chat share."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_parallm.core import (
    BASE_ADAPTER,
    Event,
    GenerationRequest,
    PromptScored,
    RequestFinished,
    SequenceOutput,
    TextTokenizer,
)
from mlx_parallm.server.respond.pieces import Piece, joined, of_output
from mlx_parallm.server.respond.wording import Wording
from mlx_parallm.server.wire.base import WireOutput
from mlx_parallm.server.wire.common import GenerationBody, PromptTokensDetails, Usage


class Answer(Wording):
    """A subclass words choices and wraps them; what is sent when, and the usage, is decided here.
    `model` is the base's name, told where no adapter served.
    """

    def __init__(self, body: GenerationBody, request: GenerationRequest, model: str, tokenizer: TextTokenizer) -> None:
        super().__init__(request)
        self._body = body
        self._tokenizer = tokenizer
        self._head: dict[str, Any] = {"id": request.request_id, "created": int(time.time()), "model": model}
        if adapter := adapter_of(request):
            self._head |= {"model": request.adapter.name, "lora_adapter": adapter}
        # A collected request's metadata is its scorer's, and long perhaps: it is not said again.
        said = body.metadata is not None and not body.collect_trajectory
        self._tail: dict[str, Any] = {"metadata": body.metadata} if said else {}
        self._unended = request.sequences
        self._held: Piece | None = None
        self._seen: set[int] = set()
        self._prompt_tokens = sum(len(prompt) for prompt in request.prompts)
        self._completion_tokens = 0

    def opening_chunks(self) -> Iterator[WireOutput]:
        return (self._chunk([piece]) for piece in self._opening())

    def chunks(self, event: Event) -> Iterator[WireOutput]:
        for piece in self._pieces(event):
            self._completion_tokens += len(piece.token_ids)
            if self._waits_for_ids(piece):
                self._held = piece
            elif self._tells(piece):
                yield self._chunk([piece])
        if isinstance(event, RequestFinished):
            yield from self._closing_chunks(event)

    def whole(self, events: Sequence[Event]) -> WireOutput:
        finished = events[-1]
        assert isinstance(finished, RequestFinished)
        pieces = [*self._opening(), *(piece for event in events for piece in self._pieces(event))]
        choices = joined(self.request.sequences, pieces)
        scored = {event.prompt_index: event for event in events if isinstance(event, PromptScored)}
        self._tail |= collected(self.request, finished)
        return self._whole(choices, usage_of(finished), scored)

    def _waits_for_ids(self, piece: Piece) -> bool:
        """Whether this is the end of the last choice of a collected request: its chunk has the trajectories' ids."""
        self._unended -= piece.finish_reason is not None
        return self.request.collection is not None and self._unended == 0

    def _closing_chunks(self, finished: RequestFinished) -> Iterator[WireOutput]:
        if self._held is not None:
            yield self._chunk([self._held], **collected(self.request, finished))
        if self._body.stream_options.include_usage:
            yield self._chunk([], usage=usage_of(finished))

    def _opening(self) -> Iterator[Piece]:
        return iter(())

    def _pieces(self, event: Event) -> Iterator[Piece]:
        if isinstance(event, SequenceOutput):
            yield of_output(event)

    def _tells(self, piece: Piece) -> bool:
        ids = self._body.return_token_ids and piece.token_ids
        return bool(piece.text or piece.scored or piece.finish_reason or ids)

    def _first(self, piece: Piece) -> bool:
        """True once for each choice."""
        if piece.index in self._seen:
            return False
        self._seen.add(piece.index)
        return True

    def _usage_so_far(self) -> dict[str, Usage | None]:
        """The usage field of a chunk that has choices: absent, null, or running, as `stream_options` says."""
        options = self._body.stream_options
        if not options.include_usage:
            return {}
        if not options.continuous_usage_stats:
            return {"usage": None}
        return {"usage": usage(self._prompt_tokens, self._completion_tokens)}

    @abstractmethod
    def _chunk(self, pieces: Sequence[Piece], **more: Any) -> WireOutput:
        """One event of the stream: a piece's, or the last one, which has the usage and no choice; `more` fields win."""

    @abstractmethod
    def _whole(self, choices: Sequence[Piece], usage: Usage, scored: dict[int, PromptScored]) -> WireOutput:
        """The one JSON body; `scored` has the prompt logprobs by prompt index."""


def adapter_of(request: GenerationRequest) -> str | None:
    """`name@version` of the adapter that serves it; None for the base."""
    return None if request.adapter == BASE_ADAPTER else str(request.adapter)


def collected(request: GenerationRequest, finished: RequestFinished) -> dict[str, Any]:
    """What the answer says of its trajectories: nothing where the request was not collected."""
    if request.collection is None:
        return {}
    warning = {"trajectory_warning": finished.trajectory_warning} if finished.trajectory_warning else {}
    return {"trajectory_ids": list(finished.trajectory_ids), **warning}


def ending(piece: Piece) -> dict[str, Any]:
    """`finish_reason`, and the stop string where one matched."""
    reason = {"finish_reason": piece.finish_reason.value if piece.finish_reason else None}
    return reason if piece.stop_reason is None else {**reason, "stop_reason": piece.stop_reason}


def usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


def usage_of(finished: RequestFinished) -> Usage:
    return Usage(
        prompt_tokens=finished.prompt_tokens,
        completion_tokens=finished.completion_tokens,
        total_tokens=finished.prompt_tokens + finished.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=finished.cached_tokens),
    )
