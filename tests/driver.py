"""Runs a scheduler without an engine: with a pure-Python memory, and a clock that the test controls."""

from __future__ import annotations

from dataclasses import fields

from mlx_parallm.core import AdapterRef, DeviceSchedule, PromptGroup, SequenceState, SequenceStatus
from mlx_parallm.scheduler.prefill import CostModel
from mlx_parallm.scheduler.scheduler import RLAwareScheduler, SchedulerConfig
from mlx_parallm.scheduler.units import DecodeUnit, OtherWork, PrefillUnit, StagingUnit, TrainingUnit, Unit

STEP = 0.05
"""Seconds of a decode step."""


class TokenBudget:
    """Rows of exactly their length, within a budget of tokens."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held: dict[int, int] = {}
        self.not_ready: set[AdapterRef] = set()

    def ready(self, adapter: AdapterRef) -> bool:
        return adapter not in self.not_ready

    def allocate(self, sequence: SequenceState, source: SequenceState | None) -> int | None:
        if sum(self.held.values()) + sequence.length > self.budget:
            return None
        assert sequence.sequence_id not in self.held
        self.held[sequence.sequence_id] = sequence.length
        return min(sequence.prompt_length - 1, source.computed) if source else 0

    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        more = max(0, tokens - self.held[sequence.sequence_id])
        if sum(self.held.values()) + more > self.budget:
            return False
        self.held[sequence.sequence_id] += more
        return True

    def free(self, sequence: SequenceState) -> None:
        del self.held[sequence.sequence_id]


class Driver:
    """Runs units, reads drawn tokens one step late, and finishes sequences that have all their tokens.

    `staging` and `micro_steps` are the numbers of units that wait; a micro-step takes `micro_step` seconds. `config`
    holds fields of SchedulerConfig or of its schedule.
    """

    def __init__(self, budget: int = 10**9, cost: CostModel | None = None, **config: object) -> None:
        self.memory = TokenBudget(budget)
        shared = {field.name: config.pop(field.name) for field in fields(DeviceSchedule) if field.name in config}
        settings = SchedulerConfig(**config, schedule=DeviceSchedule(**shared))
        self.scheduler = RLAwareScheduler(settings, self.memory, cost or CostModel(0.01, 0.001, 1e-7))
        self.now = 0.0
        self.unread: tuple[SequenceState, ...] = ()
        self.finished: list[SequenceState] = []
        self.count = 0
        self.staging = 0
        self.micro_steps = 0
        self.micro_step = 0.5
        self.training_seconds = 0.0

    def add(
        self, tokens: int, max_tokens: int = 4, group: PromptGroup | None = None, **fields: object
    ) -> SequenceState:
        self.count += 1
        sequence = SequenceState(self.count, [0] * tokens, max_tokens, self.now, group or PromptGroup(), **fields)
        self.scheduler.add(sequence)
        return sequence

    def read(self) -> None:
        drawn, self.unread = self.unread, ()
        for sequence in drawn:
            if sequence.status is SequenceStatus.FINISHED:
                continue
            sequence.tokens.append(0)
            if len(sequence.tokens) - sequence.prompt_length == sequence.max_tokens:
                self.scheduler.finish(sequence)
                self.finished.append(sequence)

    def step(self) -> Unit | None:
        self.scheduler.admit()
        other = OtherWork(staging=self.staging > 0, training=self.micro_steps > 0)
        unit = self.scheduler.next_unit(self.now, other)
        if isinstance(unit, StagingUnit):
            self.read()
            self._stage(unit)
        elif isinstance(unit, DecodeUnit):
            self.scheduler.record_launch(unit, self.now)
            self.now += STEP
            self.read()
            self.unread = unit.sequences
        elif self.unread:
            self.read()
        elif isinstance(unit, PrefillUnit):
            seconds = self.scheduler.cost.seconds([part.chunk for part in unit.parts])
            self.now += seconds
            self.scheduler.record_prefill(unit, seconds, self.now)
        elif isinstance(unit, TrainingUnit):
            self._train()
        self.scheduler.check_integrity()
        return unit

    def _stage(self, unit: StagingUnit) -> None:
        seconds = max(unit.seconds, 0.002)
        self.now += seconds
        self.staging -= 1
        self.scheduler.gap.add_staging(seconds)

    def _train(self) -> None:
        self.now += self.micro_step
        self.micro_steps -= 1
        self.training_seconds += self.micro_step
        self.scheduler.record_training(self.micro_step, self.now)

    def run(self, limit: int = 10_000) -> list[Unit]:
        units = []
        for _ in range(limit):
            had_unread = bool(self.unread)
            unit = self.step()
            if unit is None and not had_unread:
                return units
            if unit is not None:
                units.append(unit)
        raise AssertionError("never idle")
