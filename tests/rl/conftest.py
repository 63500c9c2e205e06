"""The scoring service, and a user's package that is installed for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl.scoring_rig import LONG_S, NAMES, SOURCE
from rl.user_package import install

from mlx_parallm.rl.scoring.scorers import GROUP
from mlx_parallm.rl.scoring.service import ScoringService


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Seen by this process, and by the child through what it is told."""
    install(tmp_path, "user_scorers", SOURCE, GROUP, *NAMES)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
async def service(package):
    made: list[ScoringService] = []

    def make(timeout_s: float = LONG_S, batch_size: int = 32, processes: int = 1) -> ScoringService:
        made.append(ScoringService(processes, batch_size, timeout_s))
        return made[-1]

    yield make
    for one in made:
        await one.close()
