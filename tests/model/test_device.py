"""What MLX may take, from the figures of devices that are not here."""

import mlx.core as mx
import pytest

from mlx_parallm.model.device import (
    MachineMemory,
    MemoryLimits,
    machine_memory,
    memory_limits,
    set_limits,
)

GIB, MIB = 2**30, 2**20
MAC_16 = MachineMemory(ram=16 * GIB, recommended=int(10.7 * GIB), can_wire=True)
MAC_192 = MachineMemory(ram=192 * GIB, recommended=144 * GIB, can_wire=True)
CUDA_80 = MachineMemory(ram=256 * GIB, recommended=80 * GIB, can_wire=False)
CPU_24 = MachineMemory(ram=24 * GIB, recommended=None, can_wire=False)


def test_metal_may_take_its_recommended_working_set_and_wires_nothing():
    limits = memory_limits(MAC_16)
    assert limits == MemoryLimits(MAC_16.recommended, int(0.05 * MAC_16.recommended), None)


def test_memory_is_wired_if_the_operator_asks_and_the_device_can():
    assert memory_limits(MAC_16, wire=True).wired == MAC_16.recommended
    assert memory_limits(CPU_24, wire=True).wired is None


def test_the_cache_is_neither_tiny_nor_huge():
    assert memory_limits(MAC_192).cache == 4 * GIB
    assert memory_limits(MachineMemory(4 * GIB, 3 * GIB, can_wire=True)).cache == 256 * MIB


def test_nothing_is_wired_where_there_is_no_metal():
    assert memory_limits(CUDA_80) == MemoryLimits(int(0.95 * 80 * GIB), int(0.05 * int(0.95 * 80 * GIB)), None)
    assert memory_limits(CPU_24) == MemoryLimits(int(0.8 * 24 * GIB), 32 * MIB, None)


def test_what_the_operator_sets_counts_and_never_wires_more_than_the_device_recommends():
    assert memory_limits(MAC_16, memory=6 * GIB, cache=GIB, wire=True) == MemoryLimits(6 * GIB, GIB, 6 * GIB)
    assert memory_limits(MAC_16, memory=14 * GIB, wire=True).wired == MAC_16.recommended
    assert memory_limits(MAC_16, memory=GIB, cache=2 * GIB).cache == GIB


def test_a_gpu_recommends_a_working_set_and_a_cpu_none(monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"memory_size": GIB})
    for cpu in (True, False):
        monkeypatch.setattr("mlx_parallm.model.device.on_cpu", lambda cpu=cpu: cpu)
        assert machine_memory().recommended == (None if cpu else GIB)


@pytest.fixture
def restored():
    before = mx.get_memory_limit(), mx.set_cache_limit(0)
    mx.set_cache_limit(before[1])
    yield
    mx.set_memory_limit(before[0])
    mx.set_cache_limit(before[1])


def test_they_are_set_in_this_process(restored):
    limits = memory_limits(machine_memory(), memory=3 * GIB, cache=5 * MIB)
    set_limits(limits)
    assert mx.get_memory_limit() == 3 * GIB
    assert mx.set_cache_limit(0) == 5 * MIB


def test_the_wired_limit_of_metal_is_set_only_on_request(restored, monkeypatch):
    wired = []
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    set_limits(memory_limits(MAC_16))
    set_limits(memory_limits(CPU_24, wire=True))
    assert wired == []
    set_limits(memory_limits(MAC_16, wire=True))
    assert wired == [MAC_16.recommended]
