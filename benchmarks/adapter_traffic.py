"""Greedy requests on a `DeviceLoop` that this thread drives, and a stopwatch on what the loop does."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS
from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.batch.runner import BatchRunner, Undrawn
from mlx_parallm.core import (
    AdapterRef,
    Event,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.engine.loop import DeviceLoop, EngineParts


@dataclass(frozen=True, slots=True)
class Interval:
    """From one launch of a decode step to the next: seconds without prefill, and units of staging in between."""

    seconds: float
    units: int


class Stopwatch:
    """Books what `TimedRunner` and `TimedStore` see. `pinned`: when the first row of a version was admitted."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self.steps = self.units = 0
        self.longest_unit_s = 0.0
        self.pinned: dict[AdapterRef, float] = {}
        self._launched_at: float | None = None
        self._prefill_s = 0.0
        self._units_then = 0

    def restart(self) -> None:
        """Forgets the intervals so far; the next one begins with the last launch."""
        self.intervals = []
        self.longest_unit_s = 0.0

    def launches(self) -> None:
        now = time.perf_counter()
        if self._launched_at is not None:
            seconds = now - self._launched_at - self._prefill_s
            self.intervals.append(Interval(seconds, self.units - self._units_then))
        self.steps += 1
        self._launched_at, self._prefill_s, self._units_then = now, 0.0, self.units

    def prefilled(self, seconds: float) -> None:
        self._prefill_s += seconds

    def stages(self) -> None:
        self.units += 1

    def staged(self, seconds: float) -> None:
        self.longest_unit_s = max(self.longest_unit_s, seconds)


class TimedRunner:
    """A runner under the stopwatch."""

    def __init__(self, runner: BatchRunner, watch: Stopwatch) -> None:
        self._runner = runner
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def begin(self, *arguments: Any) -> Undrawn:
        self._watch.launches()
        return self._runner.begin(*arguments)

    def prefill(self, *arguments: Any) -> None:
        started = time.perf_counter()
        self._runner.prefill(*arguments)
        self._watch.prefilled(time.perf_counter() - started)


class TimedStore:
    """A store under the stopwatch."""

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
    """A request for a continuation of prompt number `prompt`, and what has come of it.

    `gaps`: for each token, by how much its logprob is the best; empty where logprobs were not asked for.
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
    """Requests in a loop. Each leases the version that its selector means when it is sent, until it ends."""

    def __init__(self, parts: EngineParts, prompts: Sequence[tuple[int, ...]]) -> None:
        self.ended: list[Answer] = []
        self._books = parts.adapters.books
        self._loop = DeviceLoop(parts, self._take)
        self._prompts = prompts
        self._open: dict[str, tuple[Answer, ExitStack]] = {}
        self._sent = 0

    @property
    def rows(self) -> int:
        return len(self._open)

    def send(self, prompt: int, selector: str, max_tokens: int, top_logprobs: int | None = None) -> Answer:
        lease = ExitStack()
        ref = lease.enter_context(self._books.lease(selector)).ref
        answer, name = Answer(prompt, ref, max_tokens), str(self._sent)
        self._sent += 1
        self._open[name] = (answer, lease)
        sampling = SamplingParams(temperature=0.0, top_logprobs=top_logprobs)
        stopping = StopParams(max_tokens, ignore_eos=True)
        self._loop.submit(GenerationRequest(name, (self._prompts[prompt],), sampling, stopping, adapter=ref))
        return answer

    def step(self) -> None:
        """One unit of device work."""
        self._loop.step()

    def drain(self) -> None:
        """Runs until every request has ended, and checks the loop's books."""
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
