"""Sends greedy requests to a `Engine` that the calling thread runs, and times the loop's work."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS
from mlx_parallm.adapters.residency import AdapterStore
from mlx_parallm.batch.runner import BatchRunner, Pending
from mlx_parallm.batch.spans import Span
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import (
    Event,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.engine.engine import Engine, EngineParts


@dataclass(frozen=True, slots=True)
class Interval:
    """The time from the launch of a forward unit without chunks to the next launch, and its units of staging."""

    seconds: float
    units: int


class Stopwatch:
    """Collects the times from `TimedRunner` and `TimedStore`. `pinned`: when the first row of each version was
    admitted."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self.steps = self.units = 0
        self.longest_unit_s = 0.0
        self.pinned: dict[AdapterRef, float] = {}
        self._launched_at: float | None = None
        self._units_then = 0

    def restart(self) -> None:
        """Drops the intervals so far. The next one begins with the last launch."""
        self.intervals = []
        self.longest_unit_s = 0.0

    def launches(self, prefills: bool) -> None:
        """Notes the launch of a forward unit. `prefills`: it has chunks of prompts, so its time is left out."""
        now = time.perf_counter()
        if self._launched_at is not None:
            self.intervals.append(Interval(now - self._launched_at, self.units - self._units_then))
        self.steps += 1
        self._launched_at, self._units_then = None if prefills else now, self.units

    def stages(self) -> None:
        self.units += 1

    def staged(self, seconds: float) -> None:
        self.longest_unit_s = max(self.longest_unit_s, seconds)


class TimedRunner:
    """A runner that reports its calls to the stopwatch."""

    def __init__(self, runner: BatchRunner, watch: Stopwatch) -> None:
        self._runner = runner
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def begin(self, spans: Sequence[Span[Any]], *arguments: Any) -> Pending:
        self._watch.launches(prefills=any(span.tokens > 1 for span in spans))
        return self._runner.begin(spans, *arguments)


class TimedStore:
    """An adapter store that reports its calls to the stopwatch."""

    def __init__(self, store: AdapterStore, watch: Stopwatch) -> None:
        self._store = store
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def advance(self) -> None:
        self._watch.stages()
        started = time.perf_counter()
        self._store.advance()
        self._watch.staged(time.perf_counter() - started)

    def pin(self, ref: AdapterRef) -> int:
        self._watch.pinned.setdefault(ref, time.perf_counter())
        return self._store.pin(ref)


@dataclass(slots=True, eq=False)
class Answer:
    """A request to continue prompt number `prompt`, and its result so far.

    `gaps`: for each token, the difference between the two best logprobs; empty if logprobs were not requested.
    """

    prompt: int
    ref: AdapterRef
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    error: str = ""

    def take(self, output: SequenceOutput) -> None:
        self.tokens += output.token_ids
        self.gaps += [entry.top[0][1] - entry.top[1][1] for entry in output.logprobs]


class Traffic:
    """Requests to the loop. Each leases the version that its selector means when it is sent, until it ends."""

    def __init__(self, parts: EngineParts, prompts: Sequence[tuple[int, ...]]) -> None:
        self.ended: list[Answer] = []
        self._registry = parts.adapters.registry
        self._loop = Engine(parts, self._take)
        self._prompts = prompts
        self._open: dict[str, tuple[Answer, ExitStack]] = {}
        self._sent = 0

    @property
    def rows(self) -> int:
        return len(self._open)

    def send(self, prompt: int, selector: str, max_tokens: int, top_logprobs: int | None = None) -> Answer:
        lease = ExitStack()
        ref = lease.enter_context(self._registry.lease(selector)).ref
        answer, name = Answer(prompt, ref, max_tokens), str(self._sent)
        self._sent += 1
        self._open[name] = (answer, lease)
        sampling = SamplingParams(temperature=0.0, top_logprobs=top_logprobs)
        stopping = StopParams(max_tokens, ignore_eos=True)
        self._loop.submit(GenerationRequest(name, (self._prompts[prompt],), sampling, stopping, adapter=ref))
        return answer

    def step(self) -> None:
        """Runs one unit of device work."""
        self._loop.step()

    def drain(self) -> None:
        """Runs until every request has ended, then checks the loop's integrity."""
        while self._open:
            self._loop.step()
        self._loop.check_integrity()

    def _take(self, events: list[tuple[str, Event]]) -> None:
        for name, event in events:
            answer = self._open[name][0]
            if isinstance(event, SequenceOutput):
                answer.take(event)
            elif isinstance(event, RequestFailed):
                answer.error = f"{type(event.error).__name__}: {event.error}"
            if isinstance(event, RequestFinished | RequestFailed):
                self.ended.append(answer)
                self._open.pop(name)[1].close()
