"""Which linears adapters may change, found by what a pass calls."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from family_checks import build
from tiny import tiny_model

from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.linears import adapter_layout

LAYER = "model.layers.0"


def refusals(model: nn.Module) -> dict[str, str]:
    return dict(adapter_layout(model).refused)


def test_experts_that_are_called_for_their_own_tokens_are_refused() -> None:
    layout = adapter_layout(build("dbrx"))
    experts = [path for path in layout.refused if ".experts." in path]
    assert experts
    assert not any(".experts." in path for path in layout.linears)
    assert "does not get all tokens" in layout.refused[experts[0]]


def test_a_linear_whose_weight_the_model_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    attention, call = type(model.layers[0].self_attn), type(model.layers[0].self_attn).__call__

    def reads(self: nn.Module, x: mx.array, *args: object, **kwargs: object) -> mx.array:
        return call(self, x, *args, **kwargs) + 0 * (x @ self.o_proj.weight.T)

    monkeypatch.setattr(attention, "__call__", reads)
    refused = refusals(model)
    assert [path for path in refused if "embed" not in path] == [f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)]
    assert "reads by itself" in refused[f"{LAYER}.self_attn.o_proj"]


def test_a_linear_that_no_pass_calls_is_refused() -> None:
    model = tiny_model("llama")
    model.model.unused = nn.Linear(4, 4)
    assert "does not get all tokens" in refusals(model)["model.unused"]


@pytest.mark.parametrize(
    ("name", "routers"),
    [("granitemoe", "block_sparse_moe.router.layer"), ("gpt_oss", "mlp.router"), ("llama", "")],
)
def test_routers_are_found_by_what_they_give(name: str, routers: str) -> None:
    found = {spec.path.removeprefix(f"{LAYER}.") for spec in adapter_layout(build(name)) if spec.is_router}
    assert {path for path in found if not path.startswith("model.")} == ({routers} if routers else set())


def test_linears_with_the_same_input_are_a_group() -> None:
    layout = adapter_layout(build("glm4"))
    groups: dict[str, set[str]] = {}
    for spec in layout.linears.values():
        groups.setdefault(spec.group, set()).add(spec.target)
    assert set(map(frozenset, groups.values())) == {
        frozenset({"q_proj", "k_proj", "v_proj"}),
        frozenset({"o_proj"}),
        frozenset({"gate_up_proj"}),
        frozenset({"down_proj"}),
    }


def test_a_model_that_does_not_run_is_said_to() -> None:
    model = tiny_model("llama")
    model.model.norm = nn.RMSNorm(3)
    with pytest.raises(UnsupportedModelError, match="does not run"):
        adapter_layout(model)


def test_linears_are_as_before_the_trace() -> None:
    model = tiny_model("qwen3_moe")
    kinds = [type(part) for _, part in model.named_modules()]
    adapter_layout(model)
    assert [type(part) for _, part in model.named_modules()] == kinds
