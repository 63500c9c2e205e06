"""Whatever is predicted, every prompt with a row gets a chunk within 8 steps."""

from __future__ import annotations

import random

import pytest
from driver import STEP, Driver, TokenBudget, new_sequence

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.device import DeviceSchedule
from mlx_parallm.core.requests import Pooling, WorkClass
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.scheduler import RLAwareScheduler, SchedulerConfig
from mlx_parallm.engine.sequence import PromptGroup, Sequence, SequenceStatus
from mlx_parallm.engine.units import MAX_CHUNKS, MAX_STEPS_WITHOUT_CHUNK, ForwardUnit, StagingUnit, TrainingUnit
from mlx_parallm.engine.waiting import PromptKind, prompt_kind

ENDLESS = 10**9
ADAPTERS = [AdapterRef("base", 0), AdapterRef("one", 1), AdapterRef("two", 1)]


def between(rng: random.Random, low: float, high: float) -> float:
    """Spread evenly over the powers of ten in between."""
    return 10 ** rng.uniform(low, high)


class Interleaving:
    """One random run of the scheduler: predictions are wrong, units take any time, and some fail."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        terms = (between(rng, -4, 2), between(rng, -6, 0), between(rng, -10, -4), between(rng, -4, 1))
        config = SchedulerConfig(rng.choice([2, 8, 40]), rng.choice([1, 16, 64, 2048]), self.schedule())
        self.memory = TokenBudget(rng.choice([300, 10**9]))
        self.scheduler = RLAwareScheduler(config, self.memory, CostModel(*terms, scale=between(rng, -1, 1)))
        self.now = 0.0
        self.in_flight: ForwardUnit | None = None
        self.waits: dict[Sequence, int] = {}  # steps since the last chunk
        self.most = self.long_chunks = 0
        self.steps = 0
        for _ in range(rng.randint(1, 8)):
            self.add()

    def schedule(self) -> DeviceSchedule:
        share = self.rng.random()
        shares = {WorkClass.INFERENCE: share, WorkClass.TRAINING: 1 - share}
        return DeviceSchedule(self.rng.uniform(0.01, 1), between(self.rng, -3, 1), shares)

    def add(self) -> None:
        group, rng = PromptGroup(), self.rng
        for member in range(rng.choice([1, 1, 1, 3])):
            sequence = new_sequence([0] * rng.choice([1, 20, 200]), rng.choice([2, 100]), self.now, group)
            sequence.work_class, sequence.priority = rng.choice(list(WorkClass)), rng.choice([0, 0, 5])
            sequence.adapter, sequence.scored = rng.choice(ADAPTERS), member == 0 and rng.random() < 0.15
            if not sequence.scored and rng.random() < 0.15:
                sequence.pooling, sequence.max_tokens = rng.choice(list(Pooling)), 1
            self.scheduler.add(sequence)

    def disturb(self) -> None:
        match self.rng.randrange(40):
            case 0 | 1 | 2:
                self.add()
            case 3 if sequences := list(self.scheduler.sequences()):
                self.scheduler.finish(self.rng.choice(sequences))
            case 4:
                self.memory.not_ready = set(self.rng.sample(ADAPTERS, self.rng.randint(0, 2)))
            case 5:
                self.scheduler.reschedule(self.schedule())
            case 6:
                self.scheduler.pause(freeze=False)
            case 7:
                self.scheduler.resume()
            case 8 if self.rng.random() < 0.1:
                self.fail()

    def step(self) -> None:
        self.disturb()
        before = self.scheduler.live
        self.scheduler.admit()
        self.waits.update((sequence, 0) for sequence in self.scheduler.live if sequence not in before)
        self.scheduler.gap.add_wait_time(between(self.rng, -6, 0) if self.rng.random() < 0.5 else 0.0)
        unit = self.scheduler.next_unit(self.now, **self.waiting_work())
        seconds = between(self.rng, -6, 2)
        self.now += seconds
        if isinstance(unit, ForwardUnit):
            self.launch(unit)
            return
        self.read()
        if isinstance(unit, StagingUnit):
            self.scheduler.gap.add_staging(seconds)
        elif isinstance(unit, TrainingUnit):
            self.scheduler.record_training(seconds, self.now)

    def waiting_work(self) -> dict[str, bool]:
        chances = {"staging": 0.2, "urgent": 0.5, "training": 0.3}
        return {kind: self.rng.random() < chance for kind, chance in chances.items()}

    def launch(self, unit: ForwardUnit) -> None:
        """Launches a unit before the last one is read, or after that."""
        self.long_chunks = max(self.long_chunks, sum(is_long(span.row) for span in unit.chunks))
        self.scheduler.record_launch(unit, self.now)
        if unit.decodes:
            self.steps += 1
            prompts = [s for s in self.scheduler.live if s.status is SequenceStatus.PREFILLING]
            self.waits = {prompt: self.waits.get(prompt, 0) + 1 for prompt in prompts}
        self.waits.update((span.row, 0) for span in unit.chunks)
        self.most = max(self.most, *self.waits.values(), 0)
        self.read()
        self.in_flight = unit
        if self.rng.random() < 0.3:
            self.read()

    def read(self) -> None:
        unit, self.in_flight = self.in_flight, None
        if unit is None:
            return
        self.scheduler.record_done(unit, between(self.rng, -6, 2), self.now)
        for sequence in unit.sampling:
            if sequence.status is not SequenceStatus.FINISHED and sequence.unread:
                sequence.tokens.append(0)
                if len(sequence.tokens) - sequence.prompt_length == sequence.max_tokens:
                    self.scheduler.finish(sequence)

    def fail(self) -> None:
        """A fault of the device: all rows are computed again, and tokens that were not read are sampled again."""
        self.in_flight = None
        for sequence in self.scheduler.live:
            self.scheduler.preempt(sequence)
        for sequence in self.scheduler.sequences():
            sequence.forget_unread()


def is_long(sequence: Sequence) -> bool:
    return prompt_kind(sequence) is PromptKind.LONG


@pytest.mark.parametrize("seeds", [range(1000), pytest.param(range(1000, 10_000), marks=pytest.mark.slow)], ids=str)
def test_no_prompt_passes_8_steps_without_a_chunk(seeds: range) -> None:
    steps, most = 0, 0
    for seed in seeds:
        run = Interleaving(seed)
        for _ in range(80 if seed % 10 == 0 else 16):
            run.step()
        run.scheduler.check_integrity()
        assert run.most < MAX_STEPS_WITHOUT_CHUNK, f"seed {seed}"
        assert run.long_chunks <= MAX_CHUNKS, f"seed {seed}"
        steps, most = steps + run.steps, max(most, run.most)
    assert steps > 5 * len(seeds)
    assert most == MAX_STEPS_WITHOUT_CHUNK - 1, "the limit was put to the test"


@pytest.mark.parametrize(("count", "tokens"), [(30, 60), (120, 60), (40, 900)])
def test_many_prompts_share_the_steps_evenly(count: int, tokens: int) -> None:
    """Those with rows get on within 8 steps, no step is longer than the budget for that, and the others come after."""
    driver = Driver(cost=CostModel(0.05, 0.002, 0.0))
    driver.add(2, max_tokens=ENDLESS)
    [driver.step() for _ in range(4)]
    prompts = [driver.add(tokens, max_tokens=1) for _ in range(count)]
    stalls, long_prompts, since = [], [], driver.now
    while not all(prompt in driver.finished for prompt in prompts):
        assert driver.now < 1.5 * count * tokens * 0.002
        long_prompts.append(sum(map(is_long, driver.scheduler.live)))
        unit = driver.step()
        assert unit is None or isinstance(unit, ForwardUnit)
        if unit is not None:
            stalls.append(driver.now - since - STEP)
            since = driver.now
        assert all(prompt.steps_waited < MAX_STEPS_WITHOUT_CHUNK for prompt in driver.scheduler.live)
    assert max(stalls) <= driver.scheduler.gap.chunk_s + 1e-9
    assert max(long_prompts) == (8 if tokens == 900 else 0)


def test_prompts_whose_prefix_left_the_cache_get_on_too() -> None:
    """They were admitted as short ones, and are more long ones than a unit may hold chunks for."""
    driver = Driver(cost=CostModel(0.01, 0.01, 0.0))
    driver.add(2, max_tokens=ENDLESS)
    [driver.step() for _ in range(4)]
    driver.memory.cached = lambda sequence: sequence.prompt_length - 1
    driver.memory.present = lambda sequence: 0
    prompts = [driver.add(300, max_tokens=1) for _ in range(30)]
    while not all(prompt in driver.finished for prompt in prompts):
        driver.step()
        assert all(prompt.steps_waited < MAX_STEPS_WITHOUT_CHUNK for prompt in driver.scheduler.live)


def test_a_small_share_does_not_start_the_wait_again() -> None:
    """A long prompt under a stream of short ones still comes to its turn."""
    driver = Driver(max_batched_tokens=2048, cost=CostModel(0.01, 0.01, 0.0))
    driver.add(2, max_tokens=ENDLESS)
    [driver.step() for _ in range(4)]
    long = driver.add(6000, max_tokens=1)
    taken: list[int] = []
    while driver.now < 60.0:
        if driver.scheduler.waiting < 1:
            driver.add(28, max_tokens=1)
        unit = driver.step()
        if isinstance(unit, ForwardUnit):
            taken += [span.tokens for span in unit.chunks if span.row is long]
    assert max(taken) > 16


def test_time_in_the_queue_ends_with_the_first_chunk_and_not_with_the_row() -> None:
    driver = Driver(max_batched_tokens=100)
    first, second = driver.add(101), driver.add(151)
    driver.step()
    assert second.status is SequenceStatus.PREFILLING
    assert (first.started_at, second.started_at) == (pytest.approx(0.0, abs=1e-9), 0.0)
    began = driver.now
    while not second.started_at:
        began = driver.now
        driver.step()
    assert second.started_at == pytest.approx(began)
    short = driver.add(1)
    while not short.sampled:
        began = driver.now
        driver.step()
    assert short.started_at == pytest.approx(began), "one token: it decodes in its first unit"
