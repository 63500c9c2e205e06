"""Runs a scheduler without an engine: with a pure-Python memory, and a clock that the test controls."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.device import DeviceSchedule
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.scheduler import RLAwareScheduler, SchedulerConfig, gives_way
from mlx_parallm.engine.sequence import PromptGroup, Sequence, SequenceStatus
from mlx_parallm.engine.units import ForwardUnit, StagingUnit, TrainingUnit, Unit

STEP = 0.05
"""Seconds of a unit of decode rows alone."""


class TokenBudget:
    """Rows of exactly their length, within a budget of tokens. The members of a group share all but the last token of
    their prompt. `prefix`: tokens of every prompt that are in a prefix cache."""

    def __init__(self, budget: int, prefix: int = 0) -> None:
        self.budget = budget
        self.prefix = prefix
        self.held: dict[Sequence, int] = {}
        self.not_ready: set[AdapterRef] = set()

    def ready(self, adapter: AdapterRef) -> bool:
        return adapter not in self.not_ready

    def cached(self, sequence: Sequence) -> int:
        shared = any(member.status is SequenceStatus.RUNNING for member in sequence.group.members)
        return sequence.prompt_length - 1 if shared else min(self.prefix, sequence.prompt_length - 1)

    def present(self, sequence: Sequence) -> int:
        """Tokens that are there when the row opens."""
        return self.cached(sequence)

    def open(self, sequence: Sequence) -> bool:
        if sum(self.held.values()) + sequence.length > self.budget:
            return False
        assert sequence not in self.held
        self.held[sequence] = sequence.length
        sequence.computed = self.present(sequence)
        return True

    def share(self, sequence: Sequence) -> None:
        return None

    def extend(self, sequence: Sequence, tokens: int) -> bool:
        more = max(0, tokens - self.held[sequence])
        if sum(self.held.values()) + more > self.budget:
            return False
        self.held[sequence] += more
        return True

    def to_preempt(self, rows: list[Sequence], growing: Sequence) -> Sequence:
        return gives_way(rows)

    def close(self, sequence: Sequence) -> None:
        del self.held[sequence]
        sequence.computed = 0


def new_sequence(
    tokens: list[int],
    max_tokens: int,
    arrived_at: float = 0.0,
    group: PromptGroup | None = None,
    **fields: object,
) -> Sequence:
    """A sequence of no request."""
    asked = {"tokens": tokens, "max_tokens": max_tokens, "arrived_at": arrived_at}
    return Sequence(**asked, group=group or PromptGroup(), **fields)


class UnlimitedMemory:
    """Memory in which every adapter is ready and every row fits."""

    def ready(self, adapter: AdapterRef) -> bool:
        return True

    def cached(self, sequence: Sequence) -> int:
        shared = any(member.status is SequenceStatus.RUNNING for member in sequence.group.members)
        return sequence.prompt_length - 1 if shared else 0

    def open(self, sequence: Sequence) -> bool:
        sequence.computed = self.cached(sequence)
        return True

    def share(self, sequence: Sequence) -> Hashable:
        return None

    def extend(self, sequence: Sequence, tokens: int) -> bool:
        return True

    def close(self, sequence: Sequence) -> None:
        sequence.computed = 0


def new_scheduler(cost: CostModel | None = None) -> RLAwareScheduler:
    """A scheduler whose memory has no limits."""
    return RLAwareScheduler(SchedulerConfig(), UnlimitedMemory(), cost or CostModel())


class Driver:
    """Runs units, reads sampled tokens one unit late, and finishes sequences that have all their tokens.

    `staging` and `micro_steps` are the numbers of units that wait; a micro-step takes `micro_step` seconds. `config`
    holds fields of SchedulerConfig or of its schedule.
    """

    def __init__(self, budget: int = 10**9, cost: CostModel | None = None, **config: object) -> None:
        self.memory = TokenBudget(budget)
        shared = {field.name: config.pop(field.name) for field in fields(DeviceSchedule) if field.name in config}
        settings = SchedulerConfig(**config, schedule=DeviceSchedule(**shared))
        self.scheduler = RLAwareScheduler(settings, self.memory, cost or CostModel(0.01, 0.001, 1e-7))
        self.now = 0.0
        self.unread: tuple[Sequence, ...] = ()
        self.finished: list[Sequence] = []
        self.staging = 0
        self.micro_steps = 0
        self.micro_step = 0.5
        self.training_seconds = 0.0

    def add(self, tokens: int, max_tokens: int = 4, group: PromptGroup | None = None, **fields: object) -> Sequence:
        sequence = new_sequence([0] * tokens, max_tokens, self.now, group, **fields)
        self.scheduler.add(sequence)
        return sequence

    def read(self) -> None:
        sampled, self.unread = self.unread, ()
        for sequence in sampled:
            if sequence.status is SequenceStatus.FINISHED:
                continue
            sequence.tokens.append(0)
            if len(sequence.tokens) - sequence.prompt_length == sequence.max_tokens:
                self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.finished.append(sequence)

    def step(self) -> Unit | None:
        """Runs the next unit, or reads the last one if that has to be first."""
        self.scheduler.admit()
        unit = self.scheduler.next_unit(self.now, staging=self.staging > 0, training=self.micro_steps > 0)
        if isinstance(unit, ForwardUnit):
            self._forward(unit)
        elif self.unread:
            self.read()
            unit = None
        elif isinstance(unit, StagingUnit):
            self._stage(unit)
        elif isinstance(unit, TrainingUnit):
            self._train()
        self.scheduler.check_integrity()
        return unit

    def seconds(self, unit: ForwardUnit) -> float:
        """What the unit takes: a step's own time, if it has decode rows, and the predicted time of its chunks."""
        cost = self.scheduler.cost
        return (STEP if unit.decodes else cost.seconds()) + sum(cost.chunk_seconds(span.work) for span in unit.chunks)

    def _forward(self, unit: ForwardUnit) -> None:
        seconds, scale = self.seconds(unit), self.scheduler.cost.scale
        self.scheduler.record_launch(unit, self.now)
        self.now += seconds
        self.scheduler.record_done(unit, seconds, self.now)
        self.scheduler.cost.scale = scale  # its observations have tests of their own
        self.read()
        self.unread = unit.sampling
        for span in unit.chunks:
            if span.row.max_tokens == 0 and span.row.to_compute == 0:
                self._finish(span.row)

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
