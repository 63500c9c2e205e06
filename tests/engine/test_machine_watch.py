"""What the watch has the engine and training do about readings of memory, power and clocks, which are made here."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tiny import save_tiny
from training_runs import GROUP, PROMPTS, View, config

from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_parallm.app.train import run
from mlx_parallm.app.training_run import TrainOptions
from mlx_parallm.config import configure
from mlx_parallm.core.machine import UNKNOWN_MACHINE, MachineState, Relief
from mlx_parallm.core.requests import CollectionSpec, GenerationRequest, RequestFinished, SamplingParams, StopParams
from mlx_parallm.engine import machine_watch
from mlx_parallm.engine.figures import EngineStats
from mlx_parallm.engine.machine_watch import MachineWatch, Readers
from mlx_parallm.machine.memory import MemoryReading, Pressure
from mlx_parallm.machine.power import PowerReading

GIB = 1 << 30
ENOUGH, TOO_MUCH = MemoryReading(GIB, Pressure.NORMAL), MemoryReading(9 * GIB, Pressure.NORMAL)
MAINS, BATTERY = PowerReading(), PowerReading(on_battery=True)


class FakeEngine:
    """Notes the calls; one sequence runs."""

    def __init__(self) -> None:
        self.states: list[MachineState] = []
        self.forgotten = 0
        self.memory: dict[str, int] = {}

    def stats(self) -> EngineStats:
        return EngineStats(alive=True, ready=True, running=1, memory_bytes=self.memory)

    def heed(self, machine: MachineState) -> None:
        self.states.append(machine)

    def forget_speed(self) -> None:
        self.forgotten += 1


class Machine:
    """A watch over a machine whose clocks the test sets. `holds`: why training should wait,
    as it got it."""

    def __init__(self, **keys: object) -> None:
        self.awake = self.time = 1000.0
        self.engine = FakeEngine()
        readers = Readers(clocks=lambda: (self.awake, self.time))
        keys = {"server__memory_guard": 8 * GIB} | keys
        self.watch = MachineWatch(configure(**keys), self.engine, readers=readers)
        self.holds: list[str] = []
        self.watch.attach(self.holds.append)

    def look(self, seconds: int, memory: MemoryReading | None = ENOUGH, power: PowerReading | None = MAINS) -> None:
        for _ in range(seconds):
            self.awake, self.time = self.awake + 1, self.time + 1
            self.watch.look(memory, power)

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    @property
    def state(self) -> MachineState:
        return self.engine.states[-1]


def test_short_memory_is_relieved_and_all_is_undone(caplog):
    caplog.set_level(logging.INFO, "mlx_parallm")
    machine = Machine()
    machine.look(20, TOO_MUCH)
    assert (machine.state.relief, machine.state.footprint) == (Relief.REQUESTS, 9 * GIB)
    assert "memory is short" in machine.holds[-1], "training waits too"
    short = machine.state.relief_text
    machine.look(60)
    assert machine.state == MachineState(GIB, 8 * GIB)
    assert machine.holds[-1] == ""
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 8, "each change once: three steps, three back, and that training waits and resumes"
    assert sum("This process takes 9.0 GiB of at most 8.0 GiB." in text for text in said) == 3
    assert re.search("[0-9]", short) is None, "clients without a key see no figures in /health"


def test_training_waits_on_battery_and_resumes_with_the_charger(caplog):
    caplog.set_level(logging.INFO, "mlx_parallm")
    machine = Machine()
    machine.look(5)
    assert machine.holds == [""]
    machine.look(100, power=BATTERY)
    assert machine.holds[1:] == ["the machine runs on battery; connect the charger, or set --train-on-battery"]
    assert machine.state.notices == (f"Training waits: {machine.holds[-1]}.",)
    machine.look(14)
    assert machine.holds[-1], "not for a moment only"
    machine.look(10)
    assert machine.holds[2:] == [""]
    assert len(caplog.records) == 2


def test_training_on_battery_can_be_asked_for():
    machine = Machine(rl_training__train_on_battery=True)
    machine.look(30, power=BATTERY)
    machine.look(30, power=PowerReading(low_power=True))
    assert machine.holds == [""]
    machine.look(1, power=PowerReading(hot=True))
    assert machine.holds[1:] == ["the machine is too hot"]


def test_sleep_is_noticed_and_the_speed_is_measured_again(caplog):
    caplog.set_level(logging.INFO, "mlx_parallm")
    machine = Machine()
    machine.look(10)
    assert machine.engine.forgotten == 0
    machine.sleep(3600)
    machine.look(10)
    assert machine.engine.forgotten == 1
    assert "has slept for 3600 s" in caplog.text


async def test_what_cannot_be_read_is_logged_once_and_changes_nothing(caplog):
    def fails():
        raise FileNotFoundError("/proc/none")

    def odd():
        raise ValueError("an odd level")

    engine = FakeEngine()
    watch = MachineWatch(configure(), engine, readers=Readers(memory=fails, power=odd))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mlx_parallm.engine.machine_watch._INTERVAL_S", 0.0)
        async with watch.running():
            while len(engine.states) < 5:
                await asyncio.sleep(0.001)
    assert {state.relief for state in engine.states} == {Relief.NONE}
    assert {state.training_waits_for for state in engine.states} == {""}
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2, warned
    assert UNKNOWN_MACHINE.notices == ()


@pytest.fixture
def powered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], PowerReading]], None]:
    """`powered(read)`: what the power of this machine is, read without pauses."""
    monkeypatch.setattr(machine_watch, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(machine_watch, "_POWER_CALM_S", 0.0)
    return lambda read: monkeypatch.setattr(machine_watch, "Readers", partial(Readers, power=read))


@pytest.mark.timeout(120)
def test_a_run_waits_for_the_charger(tmp_path: Path, powered) -> None:
    view, left, begun = View(), 30, []

    def read() -> PowerReading:
        nonlocal left
        left -= 1
        if left > 0:
            begun.append(len(view.rollouts))
        return BATTERY if left > 0 else MAINS

    powered(read)
    assert run(config(tmp_path), TrainOptions("words", 1, GROUP, PROMPTS), view) == 0
    assert len(view.reports) == 1
    assert begun == [0] * 29


@pytest.mark.timeout(120)
async def test_a_server_on_battery_serves_and_learns_when_the_charger_is_back(tmp_path: Path, powered) -> None:
    save_tiny("llama", tmp_path / "model")
    power = [BATTERY]
    powered(lambda: power[0])
    keys = {"server__kv_cache_memory": "16MB", "checkpointing__checkpoint_dir": tmp_path / "checkpoints"}
    server = RLIntegratedServer(tmp_path / "model", LoRAConfig(rank=4), RLConfig(batch_size=2), **keys)
    async with server.session() as served:
        assert served.training is not None
        service = served.training
        while service.status().pause_reason is None:
            await asyncio.sleep(0.01)
        asked = GenerationRequest(
            "r", ((1, 2, 3),), SamplingParams(seed=1), StopParams(4), n=2, collection=CollectionSpec()
        )
        *_, end = [event async for event in served.generate(asked)]
        assert isinstance(end, RequestFinished)
        for score, trajectory in enumerate(end.trajectory_ids):
            await service.trajectories.feedback(trajectory, float(score))
        await asyncio.sleep(0.3)
        assert service.status().updates_total == 0
        power[0] = MAINS
        while service.status().updates_total == 0:
            await asyncio.sleep(0.01)
        assert service.status().pause_reason is None
