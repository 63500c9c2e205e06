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


WORKING_SET = MAC_16.recommended


@pytest.mark.parametrize(
    ("machine", "options", "limits"),
    [
        (MAC_16, {}, MemoryLimits(WORKING_SET, int(0.05 * WORKING_SET), None)),
        (MAC_16, {"wire": True}, MemoryLimits(WORKING_SET, int(0.05 * WORKING_SET), WORKING_SET)),
        (MAC_16, {"memory": 6 * GIB, "cache": GIB, "wire": True}, MemoryLimits(6 * GIB, GIB, 6 * GIB)),
        (MAC_16, {"memory": 14 * GIB, "cache": GIB, "wire": True}, MemoryLimits(14 * GIB, GIB, WORKING_SET)),
        (MAC_16, {"memory": GIB, "cache": 2 * GIB}, MemoryLimits(GIB, GIB, None)),
        (MAC_192, {}, MemoryLimits(144 * GIB, 4 * GIB, None)),
        (MachineMemory(4 * GIB, 3 * GIB, can_wire=True), {}, MemoryLimits(3 * GIB, 256 * MIB, None)),
        (CUDA_80, {}, MemoryLimits(int(0.95 * 80 * GIB), int(0.05 * int(0.95 * 80 * GIB)), None)),
        (CPU_24, {"wire": True}, MemoryLimits(int(0.8 * 24 * GIB), 32 * MIB, None)),
    ],
)
def test_what_mlx_may_take(machine, options, limits):
    """The device's working set; a cache that is neither tiny nor huge; wired if asked, where that is possible."""
    assert memory_limits(machine, **options) == limits


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
