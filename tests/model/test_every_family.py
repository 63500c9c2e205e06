"""Every model file of mlx-lm, in the configurations of its own tests and in ours: served, with adapters, and trained.
The reference is the model alone, as mlx-lm computes it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import mlx_lm.models
import pytest
from _pytest.mark import ParameterSet
from family_checks import (
    CONFIGURATIONS,
    ELSEWHERE,
    OWN_CACHES,
    error_after_reuse,
    error_of_gradients,
    errors_served,
    wrong_requests,
)
from mlx_lm.utils import MODEL_REMAPPING

HERE = [name for name in CONFIGURATIONS if name not in ELSEWHERE]
WITH_KNOWN_CACHES = [name for name in HERE if name not in OWN_CACHES]

AMPLIFIED = {
    **dict.fromkeys(("granitemoe", "jamba", "plamo2"), 5.0),
    "nemotron_h": 10.0,
    **dict.fromkeys(("longcat_flash", "longcat_flash_ngram"), 20.0),
    **dict.fromkeys(("ours bailing_hybrid", "ours kimi_k3"), 5.0),
    "ours deepseek_v41": 20.0,
    "afm7": 200.0,
}
"""How many times the limits are larger for models that amplify rounding, which differs with the BLAS's threads:
exponents of sums, experts that are chosen by close scores, or keys that the model rounds to 8 or 4 bits itself."""
QUICK = (
    "dbrx",
    "deepseek_v3",
    "gemma4_text 2",
    "gpt2",
    "gpt_bigcode",
    "gpt_oss",
    "granitemoe",
    "ours deepseek_v41",
    "plamo2",
    "qwen3_5",
    "rwkv7",
    "seed_oss",
)
"""One of each kind that the other tests lack: experts one by one, latent attention, layers that give several arrays,
other names of trunk and layers, rows one by one, a router inside a module, caches of a class of their own, attention in
parts, a gated delta net, two mixers with one state, a head of its own."""


def _cases(names: Iterable[str]) -> list[ParameterSet]:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in names]


def test_every_model_file_has_a_configuration() -> None:
    files = [path for path in Path(mlx_lm.models.__path__[0]).glob("*.py") if "\nclass Model(" in path.read_text()]
    kinds = {config["model_type"] for config in CONFIGURATIONS.values()}
    assert {path.stem for path in files} - {MODEL_REMAPPING.get(kind, kind) for kind in kinds} == set()


@pytest.mark.parametrize("name", _cases(HERE))
def test_rows_with_adapters_and_without_are_those_of_the_model_alone(name: str) -> None:
    base, adapted, change = errors_served(name)
    assert base <= 2e-5 * AMPLIFIED.get(name, 1.0)
    assert adapted <= 5e-5 * AMPLIFIED.get(name, 1.0)
    assert change > 0.1, "the adapters changed nothing"


@pytest.mark.parametrize("name", _cases(WITH_KNOWN_CACHES))
def test_a_row_goes_on_from_a_cached_prefix(name: str) -> None:
    found, error = error_after_reuse(name)
    assert found >= 64
    assert error <= 2e-5 * AMPLIFIED.get(name, 1.0)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", _cases(WITH_KNOWN_CACHES))
def test_gradients_are_those_of_the_model_alone(name: str, recomputed: bool) -> None:
    error, still = error_of_gradients(name, recomputed)
    assert error <= 1e-4 * AMPLIFIED.get(name, 1.0)
    assert still == []


@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("name", _cases(HERE))
def test_random_requests_have_the_answers_of_the_model_alone(name: str, lookahead: bool) -> None:
    assert wrong_requests(name, lookahead) == []
