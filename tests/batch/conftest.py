"""Fixtures of the tests of the KV pool."""

from __future__ import annotations

import pytest
from pool_walk import TagArena, install


@pytest.fixture
def tags(monkeypatch: pytest.MonkeyPatch) -> type[TagArena]:
    """Blocks hold tags in place of arrays."""
    install(monkeypatch)
    return TagArena
