"""Releases in their true widths, with two layers of each kind and random weights: each passes the checks that a start
makes of a model that no test covers. `true_sizes.json` says of each where its values are from.

On a CPU all weights are float32, so that the four largest have fewer experts.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from family_checks import random_model
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import quantize_model
from tiny import tiny_tokenizer

from mlx_parallm.batch.kv.cache import LoRABatchedKVCache
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.core import DeviceMemory
from mlx_parallm.engine.startup import check_unproved
from mlx_parallm.model.device import on_cpu, prepare_device
from mlx_parallm.model.families import Support
from mlx_parallm.model.hooks import install_hook
from mlx_parallm.model.loading import LoadedModel, to_float32
from mlx_parallm.model.manager import SharedModelManager

RELEASES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "true_sizes.json").read_text())


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """The next model needs the memory of this one."""
    yield
    gc.collect()
    mx.clear_cache()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("release", RELEASES)
def test_it_passes_the_checks_of_a_start(
    release: str, bits: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager, runner = _loaded(release, bits, tmp_path)
    started = time.perf_counter()
    check_unproved(manager, runner)
    print(f"{release}, {bits} bits: {manager.card.weight_bytes / 1e9:.1f} GB, {time.perf_counter() - started:.1f} s")
    assert "without adapters" not in caplog.text
    assert manager.adapter_layout.linears


def _loaded(release: str, bits: int, folder: Path) -> tuple[SharedModelManager, BatchRunner]:
    prepare_device()
    config = RELEASES[release]["config"]
    model = random_model(config)
    model.set_dtype(mx.bfloat16)
    if bits < 16:
        model, config = quantize_model(model, config, None, bits)
    stored = to_float32(model) if on_cpu() else model
    loaded = LoadedModel(release, stored, TokenizerWrapper(tiny_tokenizer()), config, folder)
    manager = SharedModelManager(loaded=loaded, progress=False)
    manager.family = replace(manager.family, support=Support.UNTESTED)
    bank = manager.install_bank(slots=2, max_rank=2)
    cache = LoRABatchedKVCache(manager.kv_layout, DeviceMemory(1 << 30), 64)
    style = install_hook(manager.model)
    return manager, BatchRunner(manager.model, cache, bank, style, manager.card.vocab_size)
