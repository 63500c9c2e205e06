"""A model of a family that no test covers: it is checked when it is loaded, and then served, adapted and trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from family_checks import CONFIGURATIONS
from lora import layout_of, random_adapter
from tiny import EOS_ID, VOCAB_SIZE, build_model, save_directory

from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.app.serve import IntegratedServer
from mlx_parallm.config import configure
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.engine import model_check
from mlx_parallm.engine.model_check import ModelVerdict, kept_verdict
from mlx_parallm.errors import AdapterFileError, UnsupportedModelError
from mlx_parallm.model.families import Finding
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.train.model import TrainableModel

CONFIG = {**CONFIGURATIONS["glm4"], "vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID, "max_position_embeddings": 512}
LORA = LoRAConfig(rank=4, target_modules=("q_proj", "gate_up_proj", "down_proj"))
KEYS = {"server__kv_cache_memory": "16MB"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_directory(build_model(CONFIG), CONFIG, tmp_path / "model")
    (tmp_path / "adapters" / "tone").mkdir(parents=True)
    return tmp_path


@pytest.mark.timeout(120)
async def test_it_learns_and_what_it_has_learnt_is_live(folder: Path) -> None:
    rl = RLConfig(learning_rate=1e-3, batch_size=2)
    given = [GivenTrajectory((1, 5, 7), (9, at), reward=float(at)) for at in (0, 1)]
    keys = {**KEYS, "checkpointing__checkpoint_dir": folder / "run"}
    async with RLIntegratedServer(folder / "model", LORA, rl, **keys).session() as served:
        report = await served.training.update(given=given)
        (live,) = [card for card in served.adapters.cards() if card.live]
    assert report.status == "published"
    assert set(live.targets) == set(LORA.target_modules)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "verdict", [None, ModelVerdict("glm4", "2 of 2", False, (), (Finding("gradients", 1.0, "wrong"),))]
)
async def test_without_right_gradients_it_is_not_trained(
    verdict: ModelVerdict | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if there is no verdict: then the whole model is checked."""
    monkeypatch.setattr(model_check, "_in_child", lambda *_: verdict)
    if verdict is None:
        logits = TrainableModel.logits
        monkeypatch.setattr(TrainableModel, "logits", lambda *given: 1.5 * logits(*given))
    server = RLIntegratedServer(folder / "model", LORA, **KEYS, checkpointing__checkpoint_dir=folder / "run")
    with pytest.raises(UnsupportedModelError, match="served and not trained"):
        async with server.session():
            pass


@pytest.mark.timeout(120)
async def test_if_only_adapters_fail_it_is_served_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        model_check,
        "_in_child",
        lambda *_: ModelVerdict("glm4", "2 of 2", False, (), (Finding("adapters", 1.0, "they differ"),)),
    )
    layout = layout_of(build_model(CONFIG))
    write_mlx_lm(folder / "adapters" / "tone", random_adapter(layout, seed=1), layout)
    keys = {**KEYS, "adapters__adapter_dir": folder / "adapters"}
    async with IntegratedServer(configure(folder / "model", **keys, rl_training__enabled=False)).session() as served:
        with pytest.raises(AdapterFileError, match="LoRA on a glm4 model is not supported"):
            await served.adapters.load("tone", "tone", replace=False)
    with pytest.raises(UnsupportedModelError, match="served and not trained: no adapter may change it"):
        async with IntegratedServer(configure(folder / "model", **keys)).session():
            pass
    assert "is served without adapters: they differ" in caplog.text


def test_a_verdict_is_found_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = SharedModelManager(folder / "model", progress=False)
    bank = manager.install_bank(2, 4)
    model_check.prove_once(manager, bank)
    kept = kept_verdict(manager)
    assert kept is not None
    assert [(each.check, each.problem) for each in kept.findings] == [
        (check, "") for check in ("batch", "adapters", "prefix cache", "gradients")
    ]
    monkeypatch.setattr(model_check, "_in_child", None)
    monkeypatch.setattr(model_check, "prove", None)
    model_check.prove_once(manager, bank)
    (file,) = (folder / "cache" / "mlx_parallm" / "checks").iterdir()
    for damaged in ("{}", "[" * 50_000, '{"family": 1e999}'):
        file.write_text(damaged)
        assert kept_verdict(manager) is None
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    assert model_check._file_of(manager) != file


DIES = [sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"]


def test_a_model_that_ends_its_process_is_tried_row_by_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, commands = subprocess.run, []

    def dies(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return run(command if "--row-by-row" in command else DIES, **options)

    monkeypatch.setattr(subprocess, "run", dies)
    manager = SharedModelManager(folder / "model", progress=False)
    model_check.prove_once(manager, manager.install_bank(2, 4))
    assert manager.plan.compatible
    assert len(commands) == 2


def test_a_model_that_always_ends_its_process_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda _, **options: run(DIES, **options))
    manager = SharedModelManager(folder / "model", progress=False)
    with pytest.raises(UnsupportedModelError, match=r"ends the process \(SIGSEGV\)"):
        model_check.prove_once(manager, manager.install_bank(2, 4))
