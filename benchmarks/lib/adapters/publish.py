"""Publishes one adapter again and again while 16 greedy rows decode. Measures the cost, and checks every token.

    version 1    control: 16 prompts with the odd weights, and no other work
    version 2    control: the same prompts with the even weights
    10 more      until every slot of the bank has been used
    ── no request left: memory is measured ──
    200 more     a version is staged and made live, then 8 steps pass; rows that end are replaced
    ── no request left: memory is measured again ──

A row keeps the version that was live when its request was sent, so its tokens must equal the control's for its prompt
and weights. After a token whose two best logprobs differ by less than rounding, the rest of the row is not compared.
"""

import gc
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from benchmarks.lib.adapters.files import random_adapter
from benchmarks.lib.adapters.traffic import Answer, Stopwatch, TimedRunner, TimedStore, Traffic
from benchmarks.lib.figures import percentile
from benchmarks.lib.prompts import short_prompts
from mlx_parallm.adapters.cards import Residence
from mlx_parallm.adapters.weights import VersionInfo
from mlx_parallm.app.adapters import find_adapters
from mlx_parallm.app.device import build_runner
from mlx_parallm.config import AdaptersConfig, Config
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.device import then
from mlx_parallm.engine.engine import EngineParts
from mlx_parallm.engine.scheduler import SchedulerConfig
from mlx_parallm.engine.startup import calibrate
from mlx_parallm.engine.text import Vocabulary
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.model.tokenizer import detokenizer_for

NAME = "churn"
ROWS, SLOTS = 16, 10
PAUSE_STEPS = 8
"""Steps between two publishes. With so many there is always a slot that no row uses."""
FEWEST_TOKENS, MOST_TOKENS = 24, 48
TIE = 10 * 1e-4
"""Ten times the difference that batches of different shapes make in a logprob."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Seconds that staging took, and seconds that making the version live took. `began` is a `time.perf_counter` time.

    `units`: units of device work. `in_slot`: whether a slot was free at once.
    """

    ref: AdapterRef
    began: float
    stage_s: float
    flip_s: float
    units: int
    in_slot: bool


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory held without requests: MLX's active bytes without the KV pool, which keeps cached prefixes and may keep
    free blocks for the next rows, and the number of arrays that Python's garbage collector knows.
    """

    active_bytes: int
    arrays: int


@dataclass(slots=True)
class Churn:
    """The measurements. The time of a step goes from its launch to the next one.

    Steps that contain chunks of prompts do not count.

    `admitted_s`: seconds from `stage` until the first row of that version, if one came before the next version.
    `compared`: number of tokens equal to the control's, up to the end of a row or its first different token. `failed`:
    number of requests that failed or got fewer tokens than asked for.
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
        """The measurements as JSON, with the spread of those that exist for every publish or step."""
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
"""Answers by (prompt, set of weights)."""


def measure(publishes: int) -> Churn:
    """Runs the benchmark in this process."""
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
    """The engine's loop on the bundled model, its requests, and two sets of weights that are published in turn."""

    def __init__(self) -> None:
        manager = SharedModelManager(progress=False)
        self.watch = Stopwatch()
        parts = _parts(manager, self.watch)
        self._store = parts.adapters
        self._pool = parts.runner.cache
        self._registry = self._store.registry
        self._weights = [random_adapter(self._store.bank.layout, seed) for seed in range(2)]
        first = self._weights[0]
        self._info = VersionInfo(first.rank, first.alpha, first.targets, first.nbytes)
        self._traffic = Traffic(parts, [tuple(manager.tokenizer.encode(text)) for text in short_prompts(ROWS, NAME)])
        self._numbers = count()
        self._lengths = random.Random(NAME)

    def controls(self) -> Controls:
        """The answers to each prompt with each set of weights, 16 rows at a time.

        Raises:
            RuntimeError: for some prompt both sets give the same text, so a wrong version would not be noticed.
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
        """Stages a version with the other set of weights, makes it live, and waits for `PAUSE_STEPS` steps."""
        version = self._registry.add(NAME, self._info)
        weights = self._weights[_set_of(version.ref)]
        began, units = time.perf_counter(), self.watch.units

        def flip(_: None) -> Publish:
            stage_s, in_slot = time.perf_counter() - began, self._store.residence(version) is Residence.SLOT
            started = time.perf_counter()
            self._registry.flip(version.ref)
            flip_s = time.perf_counter() - started
            return Publish(version.ref, began, stage_s, flip_s, self.watch.units - units, in_slot)

        published = then(self._store.stage(version, weights), flip)
        while not published.done():
            self._advance(beside_rows)
        self._pause(PAUSE_STEPS if beside_rows else 0)
        return published.result()

    def fill_up(self) -> None:
        """Runs until all rows decode, and starts the stopwatch."""
        self._pause(PAUSE_STEPS)
        self.watch.restart()

    def drained(self) -> Footprint:
        """What is there when no request runs and versions that nothing reaches have been dropped."""
        self._traffic.drain()
        while self._store.waits():
            self._traffic.step()
        gc.collect()
        mx.clear_cache()
        arrays = sum(isinstance(thing, mx.array) for thing in gc.get_objects())
        return Footprint(mx.get_active_memory() - self._pool.bytes_held - self._pool.bytes_cached, arrays)

    def answers(self) -> Sequence[Answer]:
        """The answers of all requests that ended after the controls."""
        return self._traffic.ended

    def _pause(self, steps: int) -> None:
        until = self.watch.steps + steps
        while self.watch.steps < until:
            self._advance(beside_rows=True)

    def _advance(self, beside_rows: bool) -> None:
        """Runs one unit of device work. With `beside_rows`, rows that have ended are replaced first."""
        while beside_rows and self._traffic.rows < ROWS:
            length = self._lengths.randint(FEWEST_TOKENS, MOST_TOKENS)
            self._traffic.send(next(self._numbers) % ROWS, NAME, length)
        self._traffic.step()


def _summary(values: Sequence[float]) -> dict[str, float]:
    percentiles = {f"percentile_{percent}": percentile(values, percent) for percent in (1, 50, 90, 99, 100)}
    return {"count": len(values), **percentiles}


def _set_of(ref: AdapterRef) -> int:
    """The index of the set of weights that a version has."""
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
    """The parts as the app builds them, with the stopwatch around runner and store."""
    config = Config(adapters=AdaptersConfig(max_loras=SLOTS))
    bank = manager.install_bank(config.adapters.max_loras, config.adapters.max_lora_rank)
    runner = build_runner(manager, bank, config)
    store = find_adapters(manager, config).store(bank, config.adapters.max_cpu_loras, wake=lambda: None)
    tokenizer = manager.tokenizer
    vocabulary = Vocabulary(manager.card.vocab_size, tokenizer.eos_token_ids, detokenizer_for(tokenizer))
    timed: tuple[Any, Any] = TimedRunner(runner, watch), TimedStore(store, watch)
    return EngineParts(*timed, vocabulary, SchedulerConfig(), calibrate(runner))
