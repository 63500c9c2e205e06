"""Fixtures of the tests of the KV pool, on a device that is prepared as a server prepares it."""

from __future__ import annotations

import pytest
from pool_walk import TagArena, install

from mlx_parallm.model.device import prepare_device

prepare_device()


@pytest.fixture
def tags(monkeypatch: pytest.MonkeyPatch) -> type[TagArena]:
    """Blocks hold tags in place of arrays."""
    install(monkeypatch)
    return TagArena
