"""The gated delta rule in chunks gives the values and gradients of mlx-lm's loop over tokens."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from family_checks import Served
from mlx_lm.models import gated_delta as theirs
from mlx_lm.models import rwkv7
from mlx_lm.models.ssm import ssm_update

from mlx_parallm.model.delta_rule import gated_delta, wkv7
from mlx_parallm.train.branches import Branch, Bucket
from mlx_parallm.train.context import LoraSpan
from mlx_parallm.train.model import TrainableModel


@dataclass(frozen=True)
class Case:
    """like: keys that are nearly equal, with beta near 1 and slow decay. each: every number of a key has a decay."""

    tokens: int
    key_heads: int = 2
    heads: int = 2
    like: bool = False
    each: bool = False
    rows: int = 1

    def arguments(self) -> tuple[mx.array, ...]:
        normal, shape = partial(mx.random.normal, key=None), (self.rows, self.tokens)
        keys = normal((*shape, self.key_heads, 32)) + (5 if self.like else 0)
        queries = normal((*shape, self.key_heads, 32))
        gate = normal((*shape, self.heads, 32) if self.each else (*shape, self.heads))
        return (
            queries / mx.linalg.norm(queries, axis=-1, keepdims=True) / 32**0.5,
            keys / mx.linalg.norm(keys, axis=-1, keepdims=True),
            normal((*shape, self.heads, 16)),
            -mx.exp(2 * gate - (6 if self.like else 1)),
            mx.sigmoid(2 * normal((*shape, self.heads)) + (4 if self.like else 0)),
            normal((self.rows, self.heads, 16, 32)) / 10,
        )


CASES = {
    "one token": Case(1),
    "less than a chunk": Case(3),
    "one number of a decay for each head": Case(77, heads=4, rows=2),
    "many chunks": Case(300),
    "nearly equal keys": Case(128, like=True),
    "decays of each number": Case(37, each=True, rows=2),
    "decays of each number, many chunks": Case(200, key_heads=1, heads=2, each=True),
    "decays of each number, nearly equal keys": Case(100, like=True, each=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients_are_those_of_the_loop(case: Case) -> None:
    mx.random.seed(len(str(case)))
    arguments = case.arguments()
    weights = mx.random.normal(arguments[2].shape), mx.random.normal(arguments[5].shape)

    def loss(rule: Any, *arguments: mx.array) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        read, state = rule(*arguments)
        return (read * weights[0]).sum() + (state * weights[1]).sum(), (read, state)

    def loop(q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array) -> Any:
        return theirs.gated_delta_ops(q, k, v, mx.exp(log_g), beta, state)

    both = [mx.value_and_grad(partial(loss, rule), argnums=range(6))(*arguments) for rule in (gated_delta, loop)]
    ((_, ours), our_gradients), ((_, expected), gradients) = both
    errors = [error(*pair) for pair in zip([*ours, *our_gradients], [*expected, *gradients], strict=True)]
    assert max(errors) < 1e-5, errors


def test_a_decay_that_underflows_has_a_gradient() -> None:
    q, k, v, _, beta, state = Case(8).arguments()
    log_g = mx.full((1, 8, 2), -200.0)
    gradient = mx.grad(lambda log_g: gated_delta(q, k, v, log_g, beta, state)[0].sum())(log_g)
    assert mx.isfinite(gradient).all()


def test_decays_that_erase_the_state_leave_the_others_their_digits() -> None:
    mx.random.seed(0)
    q, k, v, log_g, beta, state = Case(128).arguments()
    log_g = mx.where(mx.random.uniform(shape=log_g.shape) < 0.1, -800.0, -0.02 * mx.random.uniform(shape=log_g.shape))
    expected, _ = theirs.gated_delta_ops(q, k, v, mx.exp(log_g), beta, state)
    assert error(gated_delta(q, k, v, log_g, beta, state)[0], expected) < 3e-5


@pytest.mark.parametrize(
    ("name", "function", "rule"), [("mamba2", "ssm_update", ssm_update), ("rwkv7", "wkv7_kernel", wkv7)]
)
def test_kernels_without_gradients_are_left_out_where_there_are_gradients(
    name: str, function: str, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return rule(*args, **kwargs)

    def on_a_mac(self: Any, *given: Any) -> Any:
        *arrays, state = given
        rows, _, heads, size = arrays[0].shape
        return rwkv7.wkv7_kernel(*arrays, mx.zeros((rows, heads, size, size)) if state is None else state)

    monkeypatch.setattr(rwkv7.Rwkv7TimeMixing, "_wkv7", on_a_mac)
    monkeypatch.setattr(importlib.import_module(f"mlx_lm.models.{name}"), function, kernel)
    served = Served(name)
    trainable = TrainableModel(served.model, served.bank, served.plan, lambda *_: True)
    assert calls
    calls.clear()
    run = trainable.trunk(mx.array([1, 2, 3]), [Branch(0, 2, (Bucket(1, 1, 0),))], [LoraSpan(3, {}, 1.0)], learns=True)
    mx.eval(run.hidden)
    assert not calls


def error(got: mx.array, want: mx.array) -> float:
    return float((mx.linalg.norm(got - want) / mx.linalg.norm(want)).item())
