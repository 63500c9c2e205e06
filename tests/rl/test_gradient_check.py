"""A model that no test covers is trained only if its gradients are those of mlx-lm's code."""

from __future__ import annotations

import mlx.core as mx
import pytest
from family_checks import Served

from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.rl.learn.check import check_gradients
from mlx_parallm.rl.learn.model import TrainableModel


def checked(served: Served, recomputed: bool = False) -> None:
    trainable = TrainableModel(served.model, served.bank, served.plan, lambda *_: recomputed)
    check_gradients(trainable, served.model, served.vocab)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["gpt_oss", "olmo2", "qwen3_moe"])
def test_right_gradients_pass(name: str, recomputed: bool) -> None:
    checked(Served(name), recomputed)


def test_wrong_gradients_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served("olmo2")
    mlp = type(served.model.layers[0].mlp)
    call, calls = mlp.__call__, list[None]()

    def stops(self: object, x: mx.array) -> mx.array:
        calls.append(None)
        return call(self, x if len(x) == 1 else mx.stop_gradient(x))  # packed tokens are [N, 1, D]

    monkeypatch.setattr(mlp, "__call__", stops)
    with pytest.raises(UnsupportedModelError, match="served and not trained: its gradients differ"):
        checked(served)
    assert calls
