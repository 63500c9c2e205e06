"""Whatever is predicted, every prompt with a row gets a chunk within 8 decode steps."""

from __future__ import annotations

import random

import pytest
from driver import STEP, Driver, TokenBudget

from mlx_parallm.core import AdapterRef, DeviceSchedule, PromptGroup, SequenceState, SequenceStatus, WorkClass
from mlx_parallm.scheduler.prefill import MAX_STEPS_WITHOUT_CHUNK, CostModel
from mlx_parallm.scheduler.scheduler import RLAwareScheduler, SchedulerConfig
from mlx_parallm.scheduler.units import DecodeUnit, OtherWork, PrefillUnit, StagingUnit, TrainingUnit

ENDLESS = 10**9
ADAPTERS = [AdapterRef("base", 0), AdapterRef("one", 1), AdapterRef("two", 1)]


def between(rng: random.Random, low: float, high: float) -> float:
    """Spread evenly over the powers of ten in between."""
    return 10 ** rng.uniform(low, high)


class Interleaving:
    """One random run of the scheduler: predictions are wrong, and units take any time."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        cost = CostModel(between(rng, -4, 2), between(rng, -6, 0), between(rng, -10, -4), between(rng, -1, 1))
        config = SchedulerConfig(rng.choice([2, 8, 40]), rng.choice([1, 16, 64, 2048]), self.schedule())
        self.memory = TokenBudget(rng.choice([300, 10**9]))
        self.scheduler = RLAwareScheduler(config, self.memory, cost)
        self.now = 0.0
        self.unread: tuple[SequenceState, ...] = ()
        self.waits: dict[SequenceState, int] = {}  # decode steps since the last chunk
        self.most = 0
        self.steps = 0
        for _ in range(rng.randint(1, 8)):
            self.add()

    def schedule(self) -> DeviceSchedule:
        share = self.rng.random()
        shares = {WorkClass.INFERENCE: share, WorkClass.TRAINING: 1 - share}
        return DeviceSchedule(self.rng.uniform(0.01, 1), between(self.rng, -3, 1), shares)

    def add(self) -> None:
        group, rng = PromptGroup(), self.rng
        for _ in range(rng.choice([1, 1, 1, 3])):
            sequence = SequenceState(0, [0] * rng.choice([1, 20, 200]), rng.choice([2, 100]), self.now, group)
            sequence.sequence_id = id(sequence)
            sequence.work_class, sequence.priority = rng.choice(list(WorkClass)), rng.choice([0, 0, 5])
            sequence.adapter, sequence.scored = rng.choice(ADAPTERS), rng.random() < 0.1
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

    def step(self) -> None:
        self.disturb()
        self.scheduler.admit()
        self.scheduler.gap.add_wait_time(between(self.rng, -6, 0) if self.rng.random() < 0.5 else 0.0)
        rng = self.rng
        staging, training, urgent = rng.random() < 0.2, rng.random() < 0.3, rng.random() < 0.2
        unit = self.scheduler.next_unit(self.now, OtherWork(staging, urgent, training))
        seconds = between(rng, -6, 2)
        self.now += seconds
        if isinstance(unit, DecodeUnit):
            self.decode(unit)
            return
        self.read()
        if isinstance(unit, PrefillUnit) and all(p.sequence.status is SequenceStatus.PREFILLING for p in unit.parts):
            self.scheduler.record_prefill(unit, seconds, self.now)
            self.waits.update((part.sequence, 0) for part in unit.parts)
        elif isinstance(unit, StagingUnit):
            self.scheduler.gap.add_staging(seconds)
        elif isinstance(unit, TrainingUnit):
            self.scheduler.record_training(seconds, self.now)

    def decode(self, unit: DecodeUnit) -> None:
        self.steps += 1
        self.scheduler.record_launch(unit, self.now)
        prompts = [s for s in self.scheduler.live if s.status is SequenceStatus.PREFILLING]
        self.waits = {prompt: self.waits.get(prompt, 0) + 1 for prompt in prompts}
        self.most = max(self.most, *self.waits.values(), 0)
        self.read()
        self.unread = unit.sequences

    def read(self) -> None:
        drawn, self.unread = self.unread, ()
        for sequence in drawn:
            if sequence.status is not SequenceStatus.FINISHED:
                sequence.tokens.append(0)
                if len(sequence.tokens) - sequence.prompt_length == sequence.max_tokens:
                    self.scheduler.finish(sequence)


@pytest.mark.parametrize("seeds", [range(2500), pytest.param(range(2500, 10_000), marks=pytest.mark.slow)], ids=str)
def test_no_prompt_passes_8_decode_steps_without_a_chunk(seeds: range) -> None:
    steps, most = 0, 0
    for seed in seeds:
        run = Interleaving(seed)
        for _ in range(80 if seed % 10 == 0 else 16):
            run.step()
        run.scheduler.check_integrity()
        assert run.most <= 8, f"seed {seed}"
        steps, most = steps + run.steps, max(most, run.most)
    assert steps > 5 * len(seeds)
    assert most == MAX_STEPS_WITHOUT_CHUNK - 1, "the limit was put to the test"


@pytest.mark.parametrize("predicted", [0.01, 0.31, 1.0, 100.0])
def test_a_prompt_is_computed_beside_a_row_however_long_its_chunks_are_said_to_take(predicted: float) -> None:
    """In each gap one least chunk, though making room for rows took a little of it."""
    driver = Driver(cost=CostModel(predicted, 0.0, 0.0))
    row = driver.add(2, max_tokens=ENDLESS)
    while row.drawn < 5:
        driver.step()
    prompt = driver.add(62)
    while prompt not in driver.finished:
        driver.scheduler.gap.add_wait_time(1e-6)
        driver.step()
    assert row.drawn <= 5 + 4 + 5, "four chunks, four tokens"


def test_prompts_get_on_where_training_wants_every_gap() -> None:
    driver = Driver(training_time_share=1.0, cost=CostModel(1.0, 0.01, 0.0))
    driver.micro_steps = ENDLESS
    row = driver.add(2, max_tokens=ENDLESS)
    while not row.drawn:
        driver.step()
    prompts = [driver.add(40, max_tokens=1) for _ in range(20)]
    while not all(prompt in driver.finished for prompt in prompts):
        driver.step()
        assert all(s.steps_waited < MAX_STEPS_WITHOUT_CHUNK for s in driver.scheduler.live)
    assert driver.training_seconds > 0.0


@pytest.mark.parametrize("count", [30, 120])
def test_many_prompts_share_the_gaps_evenly(count: int) -> None:
    """All of them get on within 8 steps, and no gap is longer than the budget for that."""
    driver = Driver(cost=CostModel(0.05, 0.002, 0.0))
    driver.add(2, max_tokens=ENDLESS)
    [driver.step() for _ in range(4)]
    prompts = [driver.add(900, max_tokens=1) for _ in range(count)]
    stalls, since = [], driver.now
    while driver.now < 40.0:
        if isinstance(driver.step(), DecodeUnit):
            stalls.append(driver.now - since - STEP)
            since = driver.now
    assert all(prompt.computed > 0 for prompt in prompts)
    assert max(stalls) <= driver.scheduler.gap.prefill_s + 1e-9


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
        if isinstance(unit, PrefillUnit):
            taken += [part.tokens for part in unit.parts if part.sequence is long]
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
    while not short.drawn:
        began = driver.now
        driver.step()
    assert short.started_at == pytest.approx(began), "one token: a decode step is its first unit"
