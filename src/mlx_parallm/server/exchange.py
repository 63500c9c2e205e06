"""One HTTP request and its answer: what the routes learn of them, for the response's headers and the request log."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field
from typing import cast

from starlette.datastructures import Headers
from starlette.types import Scope

from mlx_parallm.core import BASE_ADAPTER, Event, GenerationRequest, RequestFinished, SequenceOutput
from mlx_parallm.server.wire.ignored import IgnoredFields

REQUEST_ID, IGNORED_FIELDS, LORA_ADAPTER = "x-request-id", "x-ignored-fields", "x-lora-adapter"
"""Headers of responses; the first one of requests too."""
TAKEN_ID = re.compile(r"[ -~]{1,128}")
"""Printable ASCII; any other id that a client sends is replaced."""

_KEY = "exchange"


@dataclass(slots=True)
class Exchange:
    """`request_id` is what the header of the response says. It is the client's own where `from_client`, so two requests
    may share it: `engine_id` is unique. Times are seconds; None: it did not come to that."""

    request_id: str
    from_client: bool = False
    method: str | None = None
    path: str | None = None
    arrived_at: float = field(default_factory=time.monotonic)
    status: int | None = None
    error: str | None = None
    disconnected: bool = False
    ignored: IgnoredFields = field(default_factory=IgnoredFields)
    generates: bool = False
    engine_id: str | None = None
    model: str | None = None
    adapter: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float | None = None
    first_token_s: float | None = None
    finish: list[str] = field(default_factory=list)

    @classmethod
    def begun(cls, scope: Scope) -> Exchange:
        """The exchange of a request that has just come; `exchange_of` finds it from now on."""
        sent = Headers(scope=scope).get(REQUEST_ID, "")
        taken = TAKEN_ID.fullmatch(sent) is not None
        exchange = cls(sent if taken else new_request_id("req"), taken, scope["method"], scope["path"])
        scope.setdefault("state", {})[_KEY] = exchange
        return exchange

    def asks(self, model: str) -> None:
        """It is a request for a generation, of the model or the adapter of that name."""
        self.generates = True
        self.model = model

    def planned(self, request: GenerationRequest) -> None:
        """What the engine is asked for; its id is the exchange's too, unless the client has chosen one."""
        self.engine_id = request.request_id
        if not self.from_client:
            self.request_id = request.request_id
        self.adapter = None if request.adapter == BASE_ADAPTER else str(request.adapter)
        self.prompt_tokens = sum(map(len, request.prompts))

    def see(self, event: Event) -> None:
        """One event of the engine."""
        if isinstance(event, SequenceOutput):
            self._see_output(event)
        elif isinstance(event, RequestFinished):
            self.cached_tokens = event.cached_tokens
            self.queue_s = event.started_at - event.arrived_at if event.started_at else None
            self.first_token_s = event.first_token_at - event.arrived_at if event.completion_tokens else None

    def _see_output(self, output: SequenceOutput) -> None:
        self.completion_tokens += len(output.token_ids)
        if output.token_ids and self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.arrived_at
        if output.finish_reason and output.finish_reason.value not in self.finish:
            self.finish.append(output.finish_reason.value)

    @property
    def finish_reason(self) -> str | None:
        """Of all sequences; None: nothing was generated."""
        if self.disconnected:
            return "disconnect"
        if self.error and self.engine_id:
            return "error"
        return ",".join(self.finish) or None


def exchange_of(scope: Scope) -> Exchange:
    return cast(Exchange, scope["state"][_KEY])


def new_request_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
