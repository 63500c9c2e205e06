"""Which versions an adapter went through, and how stale each of them is."""

from __future__ import annotations

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.rl.checkpoints import VersionHistory

NAME = "math"


def ref(version: int) -> AdapterRef:
    return AdapterRef(NAME, version)


def test_lag_counts_publications_not_version_numbers() -> None:
    versions = VersionHistory(BASE_ADAPTER)
    for version in (2, 5):
        versions.append(ref(version))
    assert [versions.staleness(r) for r in (BASE_ADAPTER, ref(2), ref(5), ref(3))] == [2, 1, 0, None]
    versions.rewind_to(ref(2))
    versions.append(ref(6))
    assert [versions.staleness(r) for r in (BASE_ADAPTER, ref(2), ref(5), ref(6))] == [2, 1, None, 0]
    assert versions.includes_ever(ref(5))
    assert not versions.includes_ever(ref(3))
    versions.rewind_to(ref(1))
    assert [versions.staleness(r) for r in (BASE_ADAPTER, ref(6), ref(1))] == [None, None, 0]
    assert versions.latest == ref(1)
