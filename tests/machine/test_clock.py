"""Which clocks count while the machine sleeps, and which stand still."""

import time

import pytest
from starlette.datastructures import Headers

from mlx_parallm.server.access import LIFETIME_S, KeyRing, Sessions


@pytest.fixture
def sleep(monkeypatch):
    """`sleep(seconds)`: the lid is closed for so long. `time.monotonic` stands still meanwhile, as it does then."""
    real, naps = time.clock_gettime, []
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + sum(naps))
    return naps.append


def test_a_login_ends_though_the_machine_has_slept(sleep):
    ring = KeyRing("secret")
    sessions, (key,) = Sessions(ring), ring.keys
    cookie = Headers({"cookie": f"mlx_parallm_session={sessions.open(key)}"})
    assert sessions.key_of(cookie) is not None
    sleep(LIFETIME_S)
    assert sessions.key_of(cookie) is None
