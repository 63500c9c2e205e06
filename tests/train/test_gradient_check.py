"""A model that no test covers is trained only if its gradients are those of mlx-lm's code."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from family_checks import Served
from mlx_lm.models import kimi_k3

from mlx_parallm.model.families import Finding
from mlx_parallm.train import packed_pass
from mlx_parallm.train.branches import Branch
from mlx_parallm.train.check import gradients
from mlx_parallm.train.context import LoraSpan, Params
from mlx_parallm.train.model import TrainableModel


def checked(served: Served, segment: int = packed_pass.SEGMENT) -> Finding:
    trainable = TrainableModel(served.model, served.bank, served.plan, lambda *_: False, segment)
    return gradients(trainable, served.model, served.vocab)


@pytest.mark.parametrize("by_parts", [True, False])
@pytest.mark.parametrize("name", ["gpt_oss", "olmo2", "qwen3_moe"])
def test_right_gradients_pass(name: str, by_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention as on a CPU, and as on a GPU."""
    monkeypatch.setattr("mlx_parallm.train.attention.on_cpu", lambda: by_parts)
    assert checked(Served(name)).problem == ""


def test_wrong_gradients_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served("olmo2")
    mlp = type(served.model.layers[0].mlp)
    call, calls = mlp.__call__, list[None]()

    def stops(self: object, x: mx.array) -> mx.array:
        calls.append(None)
        return call(self, x if len(x) == 1 else mx.stop_gradient(x))  # packed tokens are [N, 1, D]

    monkeypatch.setattr(mlp, "__call__", stops)
    assert "differ from those alone" in checked(served).problem
    assert calls


@pytest.mark.parametrize("recomputed", [True, False])
def test_layers_use_no_kernel_without_a_gradient(recomputed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi K3 mixes residuals with a kernel for Metal, before each of its parts and at the end."""
    flags: list[bool] = []
    mix = kimi_k3._attn_res_mix

    def noted(*args: Any) -> mx.array:
        flags.append(args[4])
        return mix(*args)

    monkeypatch.setattr(kimi_k3, "_attn_res_mix", noted)
    served = Served("ours kimi_k3")
    trainable = TrainableModel(served.model, served.bank, served.plan, lambda *_: recomputed)
    path, spec = next(iter(served.layout.linears.items()))
    params = {path: {"a": mx.ones(spec.a_shape(2)), "b": mx.ones(spec.b_shape(2))}}
    flags.clear()

    def value(params: Params) -> mx.array:
        return trainable.trunk(mx.arange(6), [Branch(0, 6, ())], [LoraSpan(6, params, 1.0)], learns=True).hidden.sum()

    mx.eval(mx.grad(value)(params))
    assert len(flags) > 2
    assert not any(flags)


RECURRENT = ["mamba", "mamba2", "jamba", "rwkv7", "recurrent_gemma", "nemotron_h", "plamo2", "lfm2"]


@pytest.mark.parametrize("name", [*RECURRENT, "qwen3_5", "kimi_linear", "bailing_moe_linear"])
def test_gradients_of_states_pass_through_segments(name: str) -> None:
    """Segments of 4 tokens, and of 2 tokens of both rows that share a beginning."""
    finding = checked(Served(name), segment=4)
    assert not finding.problem
    assert (finding.error or 0.0) < 1e-4
