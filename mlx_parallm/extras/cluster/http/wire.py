"""A request to the engine of another node, and its events, as lines of JSON.

POST /v1/cluster/generate   WireRequest; or /v1/cluster/sample, to which any node may give the answer
← {"clock": 812.5}          seconds on the clock that the times of its events are on
← WireEvent, one a line; the last one is `finished` or `failed`
← an empty line             a beat, each BEAT_S until the end, also while there is no event
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel, ConfigDict

from mlx_parallm import errors
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.candidates import TOP_LOGPROBS
from mlx_parallm.core.grammar import Grammar, GrammarSpec, SpecifiedGrammar
from mlx_parallm.core.requests import (
    CollectionSpec,
    Event,
    GenerationRequest,
    PromptScored,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    SamplingParams,
    SequenceOutput,
    StopParams,
    WorkClass,
)
from mlx_parallm.errors import EngineError, ParaLLMError, RequestError

BEAT, BEAT_S = b"\n", 1.0
_TIMES = ("arrived_at", "started_at", "first_token_at", "finished_at")


class _Wire(BaseModel):
    model_config = ConfigDict(
        extra="forbid", ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants"
    )


class WireRequest(_Wire):
    """The fields of `core.GenerationRequest` that another node needs. It does not pool, or choose a base. `collected`:
    the node that asks collects the answer, so this one gives `sampling_logprobs`."""

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    stopping: StopParams
    n: int
    prompt_logprobs: int | None
    scored_from: int
    adapter: AdapterRef
    work_class: WorkClass
    priority: int
    grammar: GrammarSpec | None
    visible_specials: frozenset[int]
    cache_salt: str
    key: str
    whole: bool
    collected: bool

    @classmethod
    def of(cls, request: GenerationRequest) -> WireRequest:
        """A request that `may_travel`."""
        same = {name: getattr(request, name) for name in cls.model_fields if name not in ("grammar", "collected")}
        grammar = request.grammar.spec if isinstance(request.grammar, SpecifiedGrammar) else None
        return cls.model_construct(**same, grammar=grammar, collected=request.collection is not None)

    def request(self, grammar: Grammar | None) -> GenerationRequest:
        """The request, with its grammar compiled."""
        fields = {name: getattr(self, name) for name in type(self).model_fields if name != "collected"}
        collection = CollectionSpec(None, {}) if self.collected else None
        return GenerationRequest(**{**fields, "grammar": grammar, "collection": collection})


def may_travel(request: GenerationRequest) -> bool:
    """Whether another node can answer a request: it has a grammar that can be compiled again, if any, wants no more
    than some candidates at each token, and is not pooled."""
    compiles = request.grammar is None or isinstance(request.grammar, SpecifiedGrammar)
    candidates = max(request.sampling.top_logprobs or 0, request.prompt_logprobs or 0)
    return compiles and candidates <= TOP_LOGPROBS and request.pooling is None


class WireError(_Wire):
    """An error of `errors`: the name of its class, and its text."""

    kind: str
    message: str
    param: str | None = None


class WireEvent(_Wire):
    """One event. Exactly one field is set."""

    started: RequestStarted | None = None
    scored: PromptScored | None = None
    output: SequenceOutput | None = None
    finished: RequestFinished | None = None
    failed: WireError | None = None

    @classmethod
    def line(cls, event: Event) -> bytes:
        """An event as a line."""
        match event:
            case RequestStarted():
                wire = cls.model_construct(started=event)
            case PromptScored():
                wire = cls.model_construct(scored=event)
            case SequenceOutput():
                wire = cls.model_construct(output=event)
            case RequestFinished():
                wire = cls.model_construct(finished=event)
            case RequestFailed():
                wire = cls.model_construct(failed=_wire_error(event.error))
            case _:
                raise AssertionError("a pooled request does not travel")
        return wire.model_dump_json(exclude_unset=True).encode() + b"\n"

    def event(self, clock_shift: float) -> Event:
        """The event. `clock_shift`: what is added to its times, so that they are on this machine's clock."""
        if (timed := self.started or self.finished) is not None:
            times = [name for name in _TIMES if hasattr(timed, name)]
            return replace(timed, **{name: getattr(timed, name) + clock_shift for name in times})
        if self.failed is not None:
            return RequestFailed(_error(self.failed))
        event = self.output or self.scored
        if event is None:
            raise EngineError("a node has sent an event that is not known here")
        return event


class WireClock(_Wire):
    """The first line."""

    clock: float


def _wire_error(error: Exception) -> WireError:
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ in (errors.__name__, "builtins"))
    return WireError(kind=kind.__name__, message=str(error), param=getattr(error, "param", None))


def _error(error: WireError) -> ParaLLMError:
    kind = getattr(errors, error.kind, None)
    if isinstance(kind, type) and issubclass(kind, RequestError) and kind is not errors.OverloadedError:
        return kind(error.message, error.param)
    if isinstance(kind, type) and issubclass(kind, ParaLLMError):
        return kind(error.message)
    return EngineError(error.message)
