"""Every model file of mlx-lm, in the configurations of its own tests and in ours: served, with adapters, and trained.
The reference is the model alone, as mlx-lm computes it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import mlx_lm.models
import pytest
from _pytest.mark import ParameterSet
from family_checks import CONFIGURATIONS, error_after_reuse, error_of_gradients, errors_served
from mlx_lm.utils import MODEL_REMAPPING

ELSEWHERE = {
    "bitnet": "mlx-lm needs Metal",
    "olmo": "mlx-lm needs a package",
    "phi3small": "mlx-lm corrupts memory",
    "ours muse_spark": "mlx-lm needs Metal",
}
"""Those that mlx-lm itself cannot run here."""
HERE = [name for name in CONFIGURATIONS if name not in ELSEWHERE]

_OTHER = "a cache or an attention of another kind"
NOT_SERVED = {
    **dict.fromkeys(("deepseek_v32", "ours glm_moe_dsa", "ours minimax_m3_vl"), "an indexer's keys"),
    "ours deepseek_v41": "a cache of its own",
    "ours nemotron-nas": "a layer without attention has a cache and does not use it",
    "ours phixtral": "the trunk must be called with a mask",
    "ours plamo3": "masks a window of one token more than its cache keeps",
    "baichuan_m1": "an attention that keeps a state, too",
    **dict.fromkeys(("afm7", "llama4", "gpt_bigcode", "plamo2"), _OTHER),
}
NOT_TRAINED = {
    **dict.fromkeys(("gemma2", "plamo"), "attention in the model's own code"),
    "ours gptj": "the trunk calls its layers with names of arguments",
    **dict.fromkeys(("gemma3n", "iquestloopcoder", "longcat_flash_ngram"), "layers in the model's own code"),
}
NOT_RECOMPUTED = {"ours kimi_k3": "layers also give what they computed to an object of Python"}
"""Those whose gradients are wrong if layers are computed again in the backward pass."""
STILL = {"ours phimoe": {"gate"}}
"""The linears whose gradients are zero in mlx-lm's model too, because it only picks experts by them."""
AMPLIFIED = {"jamba": 5.0, "nemotron_h": 10.0, "longcat_flash": 20.0, "longcat_flash_ngram": 20.0, "ours kimi_k3": 3.0}
"""How many times the limits are larger for models that amplify rounding, which differs with the BLAS's threads."""
QUICK = ("dbrx", "gemma4_text 2", "gpt2", "gpt_oss", "granitemoe", "qwen3_5", "rwkv7", "seed_oss")
"""One of each kind that the other tests lack: experts one by one, layers that give several arrays, other names of trunk
and layers, a router inside a module, a gated delta net, two mixers with one state, a head of its own."""


def _cases(names: Iterable[str], without: dict[str, str]) -> list[ParameterSet]:
    cases = []
    for name in names:
        marks = [pytest.mark.xfail(strict=True, reason=without[name])] if name in without else []
        cases.append(pytest.param(name, marks=marks if name in QUICK else [*marks, pytest.mark.slow]))
    return cases


def test_every_model_file_has_a_configuration() -> None:
    files = [path for path in Path(mlx_lm.models.__path__[0]).glob("*.py") if "\nclass Model(" in path.read_text()]
    kinds = {config["model_type"] for config in CONFIGURATIONS.values()}
    assert {path.stem for path in files} - {MODEL_REMAPPING.get(kind, kind) for kind in kinds} == set()


@pytest.mark.parametrize("name", _cases(HERE, NOT_SERVED))
def test_rows_with_adapters_and_without_are_those_of_the_model_alone(name: str) -> None:
    base, adapted, change = errors_served(name)
    assert base <= 2e-5 * AMPLIFIED.get(name, 1.0)
    assert adapted <= 5e-5 * AMPLIFIED.get(name, 1.0)
    assert change > 0.1, "the adapters changed nothing"


@pytest.mark.parametrize("name", _cases([name for name in HERE if name not in NOT_SERVED], {}))
def test_a_row_goes_on_from_a_cached_prefix(name: str) -> None:
    found, error = error_after_reuse(name)
    assert found >= 64
    assert error <= 2e-5 * AMPLIFIED.get(name, 1.0)


@pytest.mark.parametrize("name", _cases([name for name in HERE if name not in NOT_SERVED], NOT_TRAINED))
def test_gradients_are_those_of_the_model_alone(name: str) -> None:
    _check_gradients(name, recomputed=False)


@pytest.mark.parametrize(
    "name", _cases([name for name in HERE if name not in NOT_SERVED], NOT_TRAINED | NOT_RECOMPUTED)
)
def test_they_are_the_same_if_layers_are_computed_again(name: str) -> None:
    _check_gradients(name, recomputed=True)


def _check_gradients(name: str, recomputed: bool) -> None:
    error, still = error_of_gradients(name, recomputed)
    assert error <= 1e-4 * AMPLIFIED.get(name, 1.0)
    assert {path.rpartition(".")[2] for path in still} == STILL.get(name, set())
