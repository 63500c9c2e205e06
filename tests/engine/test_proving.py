"""What a model of a family that no test covers gets before it serves."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_checks import CONFIGURATIONS, build
from tiny import save_directory

from mlx_parallm.engine.proving import prove
from mlx_parallm.model.manager import SharedModelManager


@pytest.mark.parametrize(("name", "compatible"), [("olmo2", False), ("gpt_bigcode", True)])
def test_what_does_not_run_in_a_batch_runs_row_by_row(
    name: str, compatible: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_directory(build(name), {**CONFIGURATIONS[name], "max_position_embeddings": 512}, tmp_path / name)
    manager = SharedModelManager(tmp_path / name, progress=False)
    assert not manager.plan.compatible
    prove(manager, manager.install_bank(2, 4))
    assert manager.plan.compatible is compatible
    assert ("is served row by row" in caplog.text) is compatible
