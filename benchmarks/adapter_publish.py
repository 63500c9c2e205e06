"""One adapter published again and again under 16 greedy rows: what a publish costs them, and whether any is wrong.

    version 1    control: 16 prompts with the odd weights, nothing else going on
    version 2    control: the same prompts with the even ones
    10 more      until every slot of the bank has been used
    ── drained: memory is taken ──
    200 more     a version is staged, its name flipped, 8 steps pass; rows that end are replaced
    ── drained: memory is taken again ──

A row keeps the version that was live when it was sent, so it must draw what the control of its prompt and weights
drew. Where the control's two best logprobs are closer than rounding, the rest of the row says nothing.
"""

import gc
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from adapter_files import random_adapter
from adapter_traffic import Answer, Stopwatch, TimedRunner, TimedStore, Traffic
from prompts import short_prompts
from spread import percentile

from mlx_parallm.adapters.versions import VersionInfo
from mlx_parallm.app import build_runner
from mlx_parallm.app.adapters import build_bank, build_store
from mlx_parallm.config import AdaptersConfig, Config
from mlx_parallm.core import AdapterRef, Residence
from mlx_parallm.engine.calibrate import calibrate
from mlx_parallm.engine.live import Vocabulary
from mlx_parallm.engine.loop import EngineParts
from mlx_parallm.model.detokenizer import Detokenizer
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.scheduler.rl_aware import SchedulerConfig

NAME = "churn"
ROWS, SLOTS = 16, 10
PAUSE_STEPS = 8
"""Steps between a flip and the next publish: enough that there always is a slot without rows."""
FEWEST_TOKENS, MOST_TOKENS = 24, 48
TIE = 10 * 1e-4
"""Logprobs of one row in batches of different kinds agree to a tenth of this."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Seconds from `stage` until the flip, and of the flip itself; `began` on `time.perf_counter`'s clock.

    `units`: of device work. `in_slot`: there was a slot for it at once.
    """

    ref: AdapterRef
    began: float
    stage_s: float
    flip_s: float
    units: int
    in_slot: bool


@dataclass(frozen=True, slots=True)
class Footprint:
    """What is held while no request is: MLX's active bytes without the KV pool's, which keeps an empty slab or two,
    and the arrays that Python's collector knows.
    """

    active_bytes: int
    arrays: int


@dataclass(slots=True)
class Churn:
    """What happened. Step seconds go from launch to launch, without prefill.

    `admitted_s`: from `stage` until the first row of that version, where one came before the next version.
    `compared`: tokens that agree with the control,
    up to a row's end, or to the first that differs. `failed`: errors of requests, and answers cut short.
    """

    publishes: list[Publish]
    admitted_s: list[float]
    quiet_step_s: list[float]
    staging_step_s: list[float]
    longest_unit_s: float
    before: Footprint
    after: Footprint
    requests: int = 0
    compared: int = 0
    ties: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """JSON; of what is there for every publish or step, how it is spread."""
        taken: dict[str, Sequence[float]] = {
            "stage_s": [publish.stage_s for publish in self.publishes],
            "flip_s": [publish.flip_s for publish in self.publishes],
            "units": [publish.units for publish in self.publishes],
            "admitted_s": self.admitted_s,
            "quiet_step_s": self.quiet_step_s,
            "staging_step_s": self.staging_step_s,
        }
        rest = {name: value for name, value in asdict(self).items() if name not in {*taken, "publishes"}}
        return {**{name: _summary(values) for name, values in taken.items()}, **rest}


Controls = Mapping[tuple[int, int], Answer]
"""By prompt and set of weights."""


def measure(publishes: int) -> Churn:
    """In this process."""
    bench = _Bench()
    controls = bench.controls()
    for _ in range(SLOTS):
        bench.publish()
    before = bench.drained()
    bench.fill_up()
    made = [_shown(bench.publish(), number) for number in range(publishes)]
    watch, intervals = bench.watch, tuple(bench.watch.intervals)
    result = Churn(
        publishes=made,
        admitted_s=[watch.pinned[one.ref] - one.began for one in made if one.ref in watch.pinned],
        quiet_step_s=[interval.seconds for interval in intervals if not interval.units],
        staging_step_s=[interval.seconds for interval in intervals if interval.units],
        longest_unit_s=watch.longest_unit_s,
        before=before,
        after=bench.drained(),
    )
    for answer in bench.answers():
        _compare(answer, controls[answer.prompt, _set_of(answer.ref)], result)
    return result


class _Bench:
    """The engine's loop on the bundled model, its traffic, and two sets of weights that take turns under one name."""

    def __init__(self) -> None:
        manager = SharedModelManager.load(None, progress=False)
        self.watch = Stopwatch()
        parts = _parts(manager, self.watch)
        self._store = parts.adapters
        self._pool = parts.runner.cache
        self._books = self._store.books
        self._weights = [random_adapter(self._store.bank.layout, seed) for seed in range(2)]
        first = self._weights[0]
        self._info = VersionInfo(first.rank, first.alpha, first.targets, first.nbytes)
        self._traffic = Traffic(parts, [tuple(manager.tokenizer.encode(text)) for text in short_prompts(ROWS, NAME)])
        self._numbers = count()
        self._lengths = random.Random(NAME)

    def controls(self) -> Controls:
        """Each prompt with each set of weights, 16 rows at a time.

        Raises:
            RuntimeError: the two sets do not make different texts of some prompt, so that a wrong version could hide.
        """
        controls = {}
        for _ in self._weights:
            ref = self.publish(beside_rows=False).ref
            for prompt in range(ROWS):
                controls[prompt, _set_of(ref)] = self._traffic.send(prompt, NAME, MOST_TOKENS, top_logprobs=2)
            self._traffic.drain()
        for prompt in range(ROWS):
            if controls[prompt, 0].tokens[:FEWEST_TOKENS] == controls[prompt, 1].tokens[:FEWEST_TOKENS]:
                raise RuntimeError(f"prompt {prompt} has the same continuation with both sets of weights")
        self._traffic.ended.clear()
        return controls

    def publish(self, beside_rows: bool = True) -> Publish:
        """Stages a version with the other set of weights, flips the name to it as the engine does, and pauses."""
        version = self._books.add(NAME, self._info)
        weights = self._weights[_set_of(version.ref)]
        told: list[Publish | Exception] = []
        began, units = time.perf_counter(), self.watch.units

        def staged(error: Exception | None) -> None:
            stage_s, in_slot = time.perf_counter() - began, self._store.residence(version) is Residence.SLOT
            started = time.perf_counter()
            self._books.flip(version.ref)
            flip_s = time.perf_counter() - started
            done = Publish(version.ref, began, stage_s, flip_s, self.watch.units - units, in_slot)
            told.append(error or done)

        self._store.stage(version, weights, staged)
        while not told:
            self._advance(beside_rows)
        if isinstance(told[0], Exception):
            raise told[0]
        self._pause(PAUSE_STEPS if beside_rows else 0)
        return told[0]

    def fill_up(self) -> None:
        """All rows run when it returns; the stopwatch starts here."""
        self._pause(PAUSE_STEPS)
        self.watch.restart()

    def drained(self) -> Footprint:
        self._traffic.drain()
        gc.collect()
        mx.clear_cache()
        arrays = sum(isinstance(thing, mx.array) for thing in gc.get_objects())
        return Footprint(mx.get_active_memory() - self._pool.bytes_held, arrays)

    def answers(self) -> Sequence[Answer]:
        """All that have ended since the controls."""
        return self._traffic.ended

    def _pause(self, steps: int) -> None:
        until = self.watch.steps + steps
        while self.watch.steps < until:
            self._advance(beside_rows=True)

    def _advance(self, beside_rows: bool) -> None:
        """One unit of device work, `beside_rows` after rows that have ended were replaced."""
        while beside_rows and self._traffic.rows < ROWS:
            length = self._lengths.randint(FEWEST_TOKENS, MOST_TOKENS)
            self._traffic.send(next(self._numbers) % ROWS, NAME, length)
        self._traffic.step()


def _summary(values: Sequence[float]) -> dict[str, float]:
    percentiles = {f"percentile_{percent}": percentile(values, percent) for percent in (1, 50, 90, 99, 100)}
    return {"count": len(values), **percentiles}


def _set_of(ref: AdapterRef) -> int:
    """Which weights a version has."""
    return ref.version % 2


def _compare(answer: Answer, control: Answer, result: Churn) -> None:
    result.requests += 1
    if answer.error or len(answer.tokens) != answer.max_tokens:
        result.failed.append(answer.error or "answer cut short")
        return
    pairs = enumerate(zip(answer.tokens, control.tokens, strict=False))
    differs = next((place for place, (drawn, expected) in pairs if drawn != expected), None)
    result.compared += len(answer.tokens) if differs is None else differs
    if differs is not None:
        is_tie = control.gaps[differs] < TIE
        result.ties += is_tie
        result.wrong += not is_tie


def _shown(publish: Publish, number: int) -> Publish:
    if number % 10 == 0:
        print(f"  {publish.ref}  staged in {publish.stage_s:.2f} s, flip {1e3 * publish.flip_s:.2f} ms", flush=True)
    return publish


def _parts(manager: SharedModelManager, watch: Stopwatch) -> EngineParts:
    """As the app builds them, under a stopwatch."""
    config = Config(adapters=AdaptersConfig(max_loras=SLOTS))
    bank = build_bank(manager, config)
    runner = build_runner(manager, bank, config)
    store, _ = build_store(bank, manager, config, run=None, wake=lambda: None)
    tokenizer = manager.tokenizer
    vocabulary = Vocabulary(manager.card.vocab_size, tokenizer.eos_token_ids, partial(Detokenizer, tokenizer))
    timed: tuple[Any, Any] = TimedRunner(runner, watch), TimedStore(store, watch)
    return EngineParts(*timed, vocabulary, SchedulerConfig(), calibrate(runner))
