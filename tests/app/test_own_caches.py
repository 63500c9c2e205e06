"""A server of a model whose caches are of a class of its own: it is checked, runs row by row, and refuses the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from app.engines import answer, engine
from family_checks import CONFIGURATIONS
from harness import assert_same_tokens, solo
from tiny import EOS_ID, VOCAB_SIZE, build_model, save_directory

from mlx_parallm.app import device
from mlx_parallm.app.serve import IntegratedServer
from mlx_parallm.config import configure
from mlx_parallm.errors import ConfigError, UnsupportedModelError

CONFIG = {**CONFIGURATIONS["ours deepseek_v41"], "vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID}
PROMPT = tuple(range(5, 105))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_directory(build_model(CONFIG), CONFIG, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.timeout(120)
async def test_it_is_served_row_by_row_and_not_trained(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = engine(folder)
    served.start()
    try:
        answers = [await answer(served, PROMPT) for _ in range(2)]
    finally:
        served.stop()
    model = build_model(CONFIG)
    for tokens, finished in answers:
        assert_same_tokens(tokens, solo(model, PROMPT, 8), 1e-4)
        assert finished.cached_tokens == 0
    assert "is served row by row and without a prefix cache" in caplog.text
    with pytest.raises(UnsupportedModelError, match="served and not trained: its caches are of a class of its own"):
        async with IntegratedServer(configure(folder, server__kv_cache_memory="16MB")).session():
            pass


@pytest.mark.parametrize(
    ("option", "error", "reason"),
    [
        ({"server__kv_bits": 8}, UnsupportedModelError, "--kv-bits 8 .* caches of their own"),
        ({"server__speculation": "ngram"}, UnsupportedModelError, "--speculation ngram .* caches of its own"),
        ({"server__prefix_cache_dir": "prefixes"}, ConfigError, "--prefix-cache-dir .* caches of its own"),
    ],
)
def test_what_needs_keys_and_values_is_refused(
    option: dict[str, Any], error: type[Exception], reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "prove_once", lambda *_: None)
    if "server__prefix_cache_dir" in option:
        option = {"server__prefix_cache_dir": folder.parent / "prefixes"}
    with pytest.raises(error, match=reason):
        engine(folder, **option).start()
