"""How an endpoint words a generation: what `GenerationResponse` asks of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from mlx_parallm.core import Event, GenerationRequest
from mlx_parallm.server.errors import error_body
from mlx_parallm.server.wire.base import WireOutput


class Wording(ABC):
    """One request's wording, used once: either `opening_chunks`, then `chunks` for each event in turn, or `whole` for
    all of them."""

    ENDS_WITH_DONE: ClassVar[bool] = True
    """Whether `[DONE]` ends the stream, or nothing does."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request

    @abstractmethod
    def opening_chunks(self) -> Iterator[WireOutput]:
        """What a stream says before the engine does."""

    @abstractmethod
    def chunks(self, event: Event) -> Iterator[WireOutput]:
        """The stream's chunks for one event: none when it adds nothing a client could see."""

    @abstractmethod
    def whole(self, events: Sequence[Event]) -> WireOutput:
        """The one JSON body for a finished request's events, the last of which is its RequestFinished."""

    def failed(self, error: Exception) -> WireOutput:
        """What a stream says when the request fails after its begin."""
        return error_body(error)
