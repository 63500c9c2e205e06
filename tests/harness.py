"""Builds an `Engine` over a tiny model, also on a device thread, and what tests read off its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from lora import remove_adapters
from mlx_lm.models.cache import make_prompt_cache
from tiny import tiny_model

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.registry import AdapterRegistry
from mlx_parallm.adapters.residency import AdapterStore
from mlx_parallm.adapters.weights import AdapterWeights, VersionInfo
from mlx_parallm.batch.hidden import HiddenStates
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.device import DeviceSchedule, TrainingWork
from mlx_parallm.core.requests import (
    Event,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.draft_head import DraftHead
from mlx_parallm.engine.draft_model import DraftModel
from mlx_parallm.engine.engine import Engine, EngineParts
from mlx_parallm.engine.scheduler import SchedulerConfig
from mlx_parallm.engine.speculate import Source
from mlx_parallm.engine.text import Vocabulary
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.kv.arena import Arena
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.device_memory import DeviceMemory
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters
from mlx_parallm.model.mtp import PredictionHead, attached

T = TypeVar("T")

GREEDY = SamplingParams(temperature=0.0)
TINY = 1e-5
"""Invariant 8's bound on logprobs across shapes, for tiny float32 models."""
SCHEDULE = DeviceSchedule()


class PlainText:
    """Every token is its number in angle brackets."""

    def add(self, token_id: int) -> str:
        return f"<{token_id}>"

    def finish(self) -> str:
        return ""


class FixedCost(CostModel):
    """Is not corrected, so that the time of passes decides nothing."""

    def observe(self, *observed: object, **_: object) -> None:
        pass


@dataclass
class Harness:
    """A loop and everything it published. `files` is what the adapters' files would hold."""

    loop: Engine
    runner: BatchRunner
    adapters: AdapterStore
    files: dict[str, AdapterWeights]
    wakes: list[None]
    events: list[tuple[str, Event]] = field(default_factory=list)

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **fields: object) -> None:
        stopping = fields.pop("stopping", StopParams(max_tokens))
        sampling = fields.pop("sampling", GREEDY)
        self.loop.submit(GenerationRequest(request_id, (tuple(prompt),), sampling, stopping, **fields))

    def run(self, check: Callable[[], None] | None = None, limit: int = 5000) -> None:
        """Steps until idle, with all integrity checks after every step."""
        for _ in range(limit):
            self.wakes.clear()
            busy = self.loop.step()
            self.loop.check_integrity()
            if check is not None:
                check()
            if not busy and not self.wakes:
                return
        raise AssertionError(f"not idle after {limit} steps")

    def submit_all(self, rows: Iterable[Sequence[int]], max_tokens: int = 8, **fields: object) -> None:
        """Submits requests "0", "1", … with these prompts."""
        for number, row in enumerate(rows):
            self.submit(str(number), row, max_tokens, **fields)

    def answer(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **fields: object) -> list[int]:
        """Submits a request, steps until idle, and returns the tokens of its first sequence."""
        self.submit(request_id, prompt, max_tokens, **fields)
        self.run()
        return self.tokens(request_id)

    def step(self, times: int = 1) -> None:
        """Steps so many times, with all integrity checks after each."""
        for _ in range(times):
            self.loop.step()
            self.loop.check_integrity()

    def until(self, condition: Callable[[], object], limit: int = 5000) -> None:
        """Steps until the condition is true."""
        for _ in range(limit):
            if condition():
                return
            self.step()
        raise AssertionError(f"not within {limit} steps")

    def publish(self, name: str, weights: AdapterWeights, *, staged: bool = True, saved: bool = True) -> AdapterRef:
        """Adds a version and flips the name to it. `staged`: runs until it is in a slot. `saved`: it can be read again;
        otherwise no file holds it, like one that was just trained."""
        info = VersionInfo.of(weights)
        if saved:
            info = replace(info, root=f"/{name}/{id(weights)}")
            self.files[info.root] = weights
        version = self.adapters.registry.add(name, info)
        if staged:
            self.wait(self.adapters.stage(version, weights))
        self.adapters.registry.flip(version.ref)
        return version.ref

    def wait(self, future: Future[T]) -> T:
        """Steps until the future is completed. Raises its exception."""
        self.until(future.done)
        return future.result()

    def of(self, request_id: str) -> list[Event]:
        return [event for rid, event in self.events if rid == request_id]

    def outputs(self, request_id: str, index: int = 0) -> list[SequenceOutput]:
        """What was drawn for one sequence of the request."""
        return [e for e in self.of(request_id) if isinstance(e, SequenceOutput) and e.index == index]

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [token for output in self.outputs(request_id, index) for token in output.token_ids]

    def cached(self, request_id: str) -> int:
        """How many prompt tokens of a request that has finished came from the prefix cache."""
        end = self.terminal(request_id)
        assert isinstance(end, RequestFinished), end
        return end.cached_tokens

    def terminal(self, request_id: str) -> Event:
        """The request's one terminal event, which is its last."""
        events = self.of(request_id)
        ends = [event for event in events if isinstance(event, RequestFinished | RequestFailed)]
        assert len(ends) == 1, f"{request_id}: {len(ends)} terminal events"
        assert events[-1] is ends[0]
        return ends[0]


def make_harness(
    model: nn.Module | None = None,
    *,
    budget_tokens: int = 1 << 20,
    states: int = 64,
    max_rows: int = 16,
    max_length: int = 4096,
    max_batched_tokens: int = 64,
    eos_ids: Iterable[int] = (),
    slots: int = 8,
    max_rank: int = 8,
    copies: int = 8,
    keep_prefixes: bool = True,
    control_ids: Collection[int] = (),
    training: TrainingWork | None = None,
    sharing: list[DeviceMemory] | None = None,
    kv_bits: int | None = None,
    schedule: DeviceSchedule = SCHEDULE,
    speculates: bool = False,
    draft: nn.Module | PredictionHead | None = None,
    compatible: bool = False,
    **switches: Any,
) -> Harness:
    """A loop over `model` (tiny llama by default) with a pool of `budget_tokens`, and of so many recurrent states;
    `switches` go to `EngineParts`.

    `speculates`: tokens are guessed from texts and grammars. `draft`: a draft model, or the prediction head of
    `model`, guesses. Its passes are taken to cost a tenth, whatever they take.
    `compatible`: rows run one by one.
    """
    model = model or tiny_model("llama")
    plan = prepare(model, compatible)
    layout = plan.layout
    if kv_bits is not None:
        layout = layout.quantized(kv_bits)
    sharing = [] if sharing is None else sharing
    tokens = budget_tokens * (layout.bytes_per_token or Arena([], layout.dtype).block_bytes // BLOCK_TOKENS)
    device = DeviceMemory(tokens + states * layout.state_bytes, sharing)
    cache = LoRABatchedKVCache(layout, device, max_length, keep_prefixes, control_ids=control_ids)
    bank = _bank(model, slots, max_rank, layout.dtype)
    runner = BatchRunner(model, cache, bank, plan)
    files: dict[str, AdapterWeights] = {}
    wakes: list[None] = []
    store = AdapterStore(
        bank, AdapterRegistry(), lambda v: files[v.info.root], Inline(), copies, lambda: wakes.append(None)
    )
    vocabulary = Vocabulary(plan.vocab_size, frozenset(eos_ids), lambda prompt, visible_specials: PlainText())
    scheduler = SchedulerConfig(max_rows=max_rows, max_batched_tokens=max_batched_tokens, schedule=schedule)
    sources = {Source.GRAMMAR, Source.TEXT} if speculates else set[Source]()
    if draft is not None:
        sources |= {Source.GRAMMAR, Source.MODEL}
        memory = DeviceMemory(device.budget_bytes, sharing)
        cheap = FixedCost(0.001, 1e-5, 1e-9)
        if isinstance(draft, PredictionHead):
            own = _head_runner(attached(draft.model, model), bank, memory, max_length)
            runner.hidden = HiddenStates()
            switches["draft_model"] = DraftHead(own, cheap, plan.vocab_size, draft.input, runner.hidden)
        else:
            own = _draft_runner(draft, memory, max_length)
            switches["draft_model"] = DraftModel(own, cheap, plan.vocab_size, plan.vocab_size)
    switches["draft_sources"] = frozenset(sources)
    cost = (FixedCost if sources else CostModel)(0.01, 1e-4, 1e-8)
    parts = EngineParts(runner, store, vocabulary, scheduler, cost, training, **switches)
    events: list[tuple[str, Event]] = []
    return Harness(Engine(parts, events.extend), runner, store, files, wakes, events)


VOCABULARY = Vocabulary(263, frozenset(), lambda *_: PlainText())


def engine_parts(harness: Harness | None = None, cost: CostModel | None = None, **fields: Any) -> EngineParts:
    """The parts of an engine of its own, made of those of a harness. `fields` go to `EngineParts`."""
    harness = harness or make_harness()
    made = {"adapters": harness.adapters, "scheduler": SchedulerConfig(), "vocabulary": VOCABULARY} | fields
    return EngineParts(harness.runner, cost=cost or CostModel(0.01, 1e-4, 1e-8), **made)


@asynccontextmanager
async def running(build: Callable[[], EngineParts] = engine_parts) -> AsyncIterator[ContinuousBatchProcessor]:
    """An engine on a device thread, which builds its parts, with all integrity checks. It is stopped at the end."""
    processor = ContinuousBatchProcessor(build, debug=True)
    await asyncio.to_thread(processor.start)
    try:
        yield processor
    finally:
        await asyncio.to_thread(processor.stop)


def greedy(request_id: str, prompt: Sequence[int], max_tokens: int, **fields: Any) -> GenerationRequest:
    """A request for one greedy answer."""
    return GenerationRequest(request_id, (tuple(prompt),), GREEDY, StopParams(max_tokens), **fields)


def tokens_in(events: Iterable[Event]) -> list[int]:
    """The tokens of all outputs among these events."""
    return [token for event in events if isinstance(event, SequenceOutput) for token in event.token_ids]


def _draft_runner(model: nn.Module, device: DeviceMemory, max_length: int) -> BatchRunner:
    plan = prepare(model)
    bank = _bank(model, 0, 1, plan.layout.dtype)
    return BatchRunner(model, LoRABatchedKVCache(plan.layout, device, max_length), bank, plan)


def _head_runner(head: PredictionHead, bank: AdapterBank, device: DeviceMemory, max_length: int) -> BatchRunner:
    cache = LoRABatchedKVCache(head.plan.layout, device, max_length, keep_prefixes=False)
    return BatchRunner(head.model, cache, bank, head.plan)


def _bank(model: nn.Module, slots: int, max_rank: int, dtype: mx.Dtype) -> AdapterBank:
    """A bank for the model's linears. A model that had one already gets its linears back first."""
    remove_adapters(model)
    bank = AdapterBank(adapter_layout(model), slots, max_rank, dtype)
    install_adapters(model, bank)
    return bank


class Inline(Executor):
    """Runs what it is given at once."""

    def submit(self, fn, /, *args, **kwargs):
        future: Future[object] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as an executor does: it is raised where the result is asked for
            future.set_exception(error)
        return future


@dataclass(frozen=True)
class Solo:
    """A row alone, through mlx-lm's own cache: greedy tokens, and the gap between the best two logits."""

    tokens: list[int]
    gaps: list[float]


def solo(model: nn.Module, prompt: Sequence[int], max_tokens: int) -> Solo:
    cache = make_prompt_cache(model)
    inputs, tokens, gaps = mx.array([list(prompt)]), [], []
    for _ in range(max_tokens):
        logits = model(inputs, cache=cache)[0, -1]
        best = mx.sort(logits)[-2:]
        tokens.append(int(logits.argmax().item()))
        gaps.append(float((best[1] - best[0]).item()))
        inputs = mx.array([[tokens[-1]]])
    return Solo(tokens, gaps)


def assert_same_tokens(got: Sequence[int], reference: Solo, tolerance: float) -> None:
    """Invariant 8: equal wherever the solo run's top-2 gap exceeds ten times the tolerance."""
    for at, (token, expected, gap) in enumerate(zip(got, reference.tokens, reference.gaps, strict=True)):
        if token != expected:
            assert gap <= 10 * tolerance, f"token {at}: {token} instead of {expected}, gap {gap:.2e}"
            return  # after a tie the two runs go their own ways


def assert_solo(
    harness: Harness, model: nn.Module, rows: Iterable[Sequence[int]], max_tokens: int, tolerance: float = 1e-5
) -> None:
    """The requests "0", "1", … have the tokens that the model gives each of these prompts alone."""
    for number, row in enumerate(rows):
        assert_same_tokens(harness.tokens(str(number)), solo(model, row, max_tokens), tolerance)
