"""A model that no test covers is trained only if its gradients are those of mlx-lm's code."""

from __future__ import annotations

import mlx.core as mx
import pytest
from family_checks import Served

from mlx_parallm.model.checks import Finding
from mlx_parallm.rl.learn import model
from mlx_parallm.rl.learn.check import gradients
from mlx_parallm.rl.learn.model import TrainableModel


def checked(served: Served) -> Finding:
    trainable = TrainableModel(served.model, served.bank, served.plan, lambda *_: False)
    return gradients(trainable, served.model, served.vocab)


@pytest.mark.parametrize("name", ["gpt_oss", "olmo2", "qwen3_moe"])
def test_right_gradients_pass(name: str) -> None:
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


def test_gradients_are_checked_with_layers_that_are_computed_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "recomputed", lambda run: lambda given, x: [2 * each for each in run(given, x)])
    assert "differ from those alone" in checked(Served("olmo2")).problem
