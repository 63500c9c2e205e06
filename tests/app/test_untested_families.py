"""A model of a family that no test covers: it is checked when it is loaded, and then served, adapted and trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_checks import CONFIGURATIONS
from lora import layout_of, random_adapter
from tiny import EOS_ID, VOCAB_SIZE, build_model, save_directory

from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_parallm.adapters.files.write import write_mlx_lm
from mlx_parallm.app.server import IntegratedServer
from mlx_parallm.config import configure
from mlx_parallm.core import GivenTrajectory
from mlx_parallm.engine import proving
from mlx_parallm.errors import AdapterFileError, UnsupportedModelError
from mlx_parallm.rl.learn.model import TrainableModel

CONFIG = {**CONFIGURATIONS["glm4"], "vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID, "max_position_embeddings": 512}
LORA = LoRAConfig(rank=4, target_modules=("q_proj", "gate_up_proj", "down_proj"))
KEYS = {"server__kv_cache_memory": "16MB"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_directory(build_model(CONFIG), CONFIG, tmp_path / "model")
    (tmp_path / "adapters" / "tone").mkdir(parents=True)
    return tmp_path


@pytest.mark.timeout(120)
async def test_it_learns_and_what_it_has_learnt_is_live(folder: Path) -> None:
    rl = RLConfig(learning_rate=1e-3, batch_size=2)
    given = [GivenTrajectory((1, 5, 7), (9, at), reward=float(at)) for at in (0, 1)]
    keys = {**KEYS, "checkpointing__checkpoint_dir": folder / "run"}
    async with RLIntegratedServer(folder / "model", LORA, rl, **keys).session() as served:
        report = await served.training.service.update(given=given)
        (live,) = [card for card in served.adapters.cards() if card.live]
    assert report.status == "published"
    assert set(live.targets) == set(LORA.target_modules)


@pytest.mark.timeout(120)
async def test_without_right_gradients_it_is_not_trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    def fails(*_: object) -> None:
        raise UnsupportedModelError("rows with adapters differ")

    monkeypatch.setattr(proving, "check_adapters", fails)
    layout = layout_of(build_model(CONFIG))
    write_mlx_lm(folder / "adapters" / "tone", random_adapter(layout, seed=1), layout)
    keys = {**KEYS, "adapters__adapter_dir": folder / "adapters"}
    async with IntegratedServer(configure(folder / "model", **keys, rl_training__enabled=False)).session() as served:
        with pytest.raises(AdapterFileError, match="LoRA on a glm4 model is not supported"):
            await served.adapters.load("tone", "tone", replace=False)
    with pytest.raises(UnsupportedModelError, match="served and not trained: no adapter may change it"):
        async with IntegratedServer(configure(folder / "model", **keys)).session():
            pass
    assert "is served without adapters: rows with adapters differ" in caplog.text
