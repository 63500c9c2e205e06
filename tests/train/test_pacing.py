"""A micro-step cut into units: what is in each, by what stages were measured to take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlx_parallm.train.pacing import Pacer, Stage, StageKind

LAYERS = 30
FORWARD, HEAD, HEAD_BACKWARD, BACKWARD = StageKind.FORWARD, StageKind.HEAD, StageKind.HEAD_BACKWARD, StageKind.BACKWARD
SECONDS = {FORWARD: 0.010, HEAD: 0.050, HEAD_BACKWARD: 0.150, BACKWARD: 0.030}
"""Of each kind of stage of 100 tokens, on the machine of these tests."""
MICRO_STEP = [FORWARD] * LAYERS + [HEAD, HEAD_BACKWARD] + [BACKWARD] * (LAYERS - 1)


class Machine:
    """A clock that stages move on, `slow` times the seconds they take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.slow = 1.0
        self.order: list[object] = []
        monkeypatch.setattr("mlx_parallm.train.pacing.time.monotonic", lambda: self.now)
        monkeypatch.setattr("mlx_parallm.train.pacing.mx.async_eval", self._launch)
        monkeypatch.setattr("mlx_parallm.train.pacing.mx.eval", lambda _: None)

    def _launch(self, stage: tuple[int, StageKind, int]) -> None:
        at, kind, tokens = stage
        self.now += self.slow * SECONDS[kind] * tokens / 100
        self.order.append(at)

    def units(self, pacer: Pacer, kinds: Sequence[StageKind] = MICRO_STEP, tokens: int = 100) -> list[float]:
        """Seconds of each unit of one micro-step."""
        stages = [Stage(kind, (at, kind, tokens)) for at, kind in enumerate(kinds)]
        job, seconds, ended = pacer.run(stages, tokens), [], False
        while not ended:
            started = self.now
            pacer.begin()
            ended = next(job, self) is self
            seconds.append(self.now - started)
        return seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("budget", [0.3, 0.5, 1.0])
def test_no_unit_is_longer_than_the_budget_and_few_are_needed(machine: Machine, budget: float) -> None:
    pacer = Pacer(budget)
    machine.units(pacer)
    seconds = machine.units(pacer)
    assert max(seconds) <= budget
    assert len(seconds) <= sum(seconds) / (0.7 * budget - 0.15) + 1


def test_it_follows_a_machine_that_becomes_slower(machine: Machine) -> None:
    pacer = Pacer(0.5)
    machine.units(pacer)
    machine.slow = 3.0
    for _ in range(4):
        machine.units(pacer)
    assert max(machine.units(pacer)) <= 0.5
