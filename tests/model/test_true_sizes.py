"""Releases in their true widths, with two layers of each kind and random weights: each passes the checks that a start
makes of a model that no test covers. `true_sizes.json` says of each where its values are from.

On a CPU all weights are float32, so that the four largest have fewer experts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import mlx.core as mx
import pytest
from family_checks import TRUE_SIZES, true_model
from mlx.utils import tree_flatten

from mlx_parallm.engine.model_check import check_built
from mlx_parallm.model.device import prepare_device


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """The next model needs the memory of this one."""
    yield
    gc.collect()
    mx.clear_cache()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("release", TRUE_SIZES)
def test_it_passes_the_checks_of_a_start(release: str, bits: int) -> None:
    prepare_device()
    model = true_model(release, bits)
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    started = time.perf_counter()
    verdict = check_built(model)
    print(f"{release}, {bits} bits: {weights / 1e9:.1f} GB, {time.perf_counter() - started:.1f} s")
    assert not verdict.compatible
    assert [each for each in verdict.findings if each.problem] == []
    assert len(verdict.findings) == 4
