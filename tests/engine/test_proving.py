"""A model is compared with itself, in a batch and alone: what is wrong is found."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from family_checks import CONFIGURATIONS, Served, build
from tiny import save_directory

from mlx_parallm.batch.forward import Forward
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.engine.startup import Prover, prove
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.manager import SharedModelManager


@pytest.fixture
def prover() -> Prover:
    return Served("olmo2").prover


def test_what_is_right_passes(prover: Prover) -> None:
    found = prover.batch(), prover.batch(beyond_windows=True), prover.adapters(), prover.prefix()
    assert [each.problem for each in found] == [""] * 4
    assert all(each.error is not None and each.error < 1e-4 for each in found)


def test_a_lost_position_is_found(prover: Prover, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Forward.__init__

    def one_offset(self: Forward, *args: object) -> None:
        made(self, *args)
        self.offset = mx.full(self.offset.shape, self.offset.max())

    monkeypatch.setattr(Forward, "__init__", one_offset)
    assert "differ from those alone" in prover.batch().problem


def test_not_a_number_is_found(prover: Prover, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = BatchRunner.compute
    monkeypatch.setattr(BatchRunner, "compute", lambda self, *given: compute(self, *given) * float("nan"))
    assert "differ from those alone" in prover.batch().problem


def test_a_pass_that_fails_is_told(prover: Prover, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise TypeError("offset must be an integer")

    monkeypatch.setattr(BatchRunner, "compute", fails)
    assert prover.batch().problem == "offset must be an integer"


def test_adapters_of_the_wrong_row_are_found(prover: Prover, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = prover._bank
    forward = bank.forward
    monkeypatch.setattr(bank, "forward", lambda slots, lengths: forward(list(reversed(slots)), lengths))
    assert prover.batch().problem == ""
    assert "differ from those alone" in prover.adapters().problem


def test_a_prefix_that_is_not_found_is_told(prover: Prover) -> None:
    prover._runner.cache.keep_prefixes = False
    assert "0 are found" in prover.prefix().problem


def _manager(name: str, folder: Path) -> SharedModelManager:
    save_directory(build(name), {**CONFIGURATIONS[name], "max_position_embeddings": 512}, folder)
    return SharedModelManager(folder, progress=False)


@pytest.mark.parametrize(("name", "compatible"), [("olmo2", False), ("gpt_bigcode", True)])
def test_what_does_not_run_in_a_batch_runs_row_by_row(
    name: str, compatible: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = _manager(name, tmp_path)
    assert not manager.plan.compatible
    prove(manager, manager.install_bank(2, 4))
    assert manager.plan.compatible is compatible
    assert ("is served row by row" in caplog.text) is compatible


def test_what_runs_in_no_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = _manager("olmo2", tmp_path)
    compute = BatchRunner.compute
    monkeypatch.setattr(BatchRunner, "compute", lambda self, *given: -compute(self, *given))
    with pytest.raises(UnsupportedModelError, match="cannot be batched: results differ"):
        prove(manager, manager.install_bank(2, 4))
