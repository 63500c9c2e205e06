"""What the writers of embeddings and scores have in common: whole answers, and the fields around the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.core.requests import Event, GenerationRequest, RequestFinished
from mlx_parallm.server.api.answer import AnswerWriter, Watch, served_by, usage_of
from mlx_parallm.server.api.fields import WireOutput


@dataclass(kw_only=True, eq=False)
class WholeAnswerWriter(AnswerWriter):
    """Writes an answer that cannot be streamed. `model` is the base model's name."""

    request: GenerationRequest
    model: str
    watch: Watch | None = field(default=None, init=False)
    _chosen_id: str = field(default="", init=False)

    def name_after(self, chosen_id: str) -> None:
        self._chosen_id = chosen_id

    def opening_chunks(self) -> Iterator[WireOutput]:
        return iter(())

    def chunks(self, event: Event) -> Iterator[WireOutput]:
        return iter(())

    def fields(self, last: Event) -> dict[str, Any]:
        """Id, model, adapter and usage. `last`: the request's last event."""
        assert isinstance(last, RequestFinished)
        prefix = self.request.request_id.partition("-")[0]
        answer_id = f"{prefix}-{self._chosen_id}" if self._chosen_id else self.request.request_id
        return {"id": answer_id, "usage": usage_of(last), **served_by(self.request, self.model)}
