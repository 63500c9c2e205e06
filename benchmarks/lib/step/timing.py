"""Measures where the time of a decode step of the bundled model goes on this machine.

step        host: Python builds the graph            measured: the time until the arrays are asked for
            forward: the logits are computed          measured
              products: the layers' linears           measured alone, on inputs of the same shape
              attention: writes and reads keys        measured: the forward less one that skips attention
              head: the vocabulary projection         measured alone
              other: norms, rope, adds, adapters      what is left
            sampling: the tokens are drawn            measured
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any
from unittest.mock import patch

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from mlx_lm.models import llama

from benchmarks.lib.adapters.files import RANK, fill, random_adapter
from benchmarks.lib.step.decode import Decoder, Rows
from benchmarks.lib.step.models import SLOTS
from mlx_parallm.app.device import build_runner
from mlx_parallm.config import Config
from mlx_parallm.model.linears import AdaptedLinear
from mlx_parallm.model.manager import SharedModelManager

WARM_UP = 2
_STEPS_A_REPEAT = 3

Build = Callable[[], list[mx.array]]
"""Builds lazy arrays."""


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of one step. `step` is all of it; the parts are medians of their own and need not add up to it."""

    step: float
    host: float
    products: float
    attention: float
    head: float
    sampling: float
    other: float


class Timer:
    """The bundled model with adapters of all linears in its bank."""

    def __init__(self) -> None:
        self._manager = SharedModelManager(progress=False)
        bank = self._manager.install_bank(SLOTS, RANK)
        weights = random_adapter(bank.layout, seed=0, targets=())
        fill(bank, weights)
        self._runner = build_runner(self._manager, bank, Config())

    def measure(self, rows: Rows, repeats: int) -> Times:
        """The parts take turns, so that a busy machine affects all of them alike."""
        decoder = Decoder(self._runner, rows, room=_STEPS_A_REPEAT * (WARM_UP + repeats))
        products, head = self._products(len(rows.contexts)), self._head(len(rows.contexts))
        taken = [_repeat(decoder, products, head) for _ in range(WARM_UP + repeats)][WARM_UP:]
        decoder.close()
        return Times(
            **{part.name: statistics.median(getattr(one, part.name) for one in taken) for part in fields(Times)}
        )

    def _products(self, rows: int) -> Build:
        adapted = [part for _, part in self._manager.model.named_modules() if isinstance(part, AdaptedLinear)]
        linears = [part for part in adapted if part is not self._embedding]
        sizes = {part.base.weight.shape[1] for part in linears}
        inputs = {size: mx.random.normal((rows, 1, size), key=mx.random.key(size)) for size in sizes}
        mx.eval(inputs)
        return lambda: [part.base(inputs[part.base.weight.shape[1]]) for part in linears]

    @property
    def _embedding(self) -> AdaptedLinear:
        embedding: AdaptedLinear = self._manager.model.model.embed_tokens  # the head too, because the model is tied
        return embedding

    def _head(self, rows: int) -> Build:
        embedding = self._embedding.base
        hidden = mx.random.normal((rows, 1, embedding.weight.shape[1]), key=mx.random.key(0))
        mx.eval(hidden)
        return lambda: [embedding.as_linear(hidden)]


def _repeat(decoder: Decoder, products: Build, head: Build) -> Times:
    with patch.object(mx, "async_eval", lambda *_: None):
        started = time.perf_counter()
        logits = decoder.logits()
        arrays = decoder.draw()
        host = _milliseconds_since(started)
    forward, sampling = _evaluate(lambda: [logits]), _evaluate(lambda: arrays)
    without_attention = _without_attention(decoder)
    mx.eval(decoder.step())  # computes the keys and values that were not written
    linears, vocabulary = _evaluate(products), _evaluate(head)
    return Times(
        step=host + forward + sampling,
        host=host,
        products=linears,
        attention=forward - without_attention,
        head=vocabulary,
        sampling=sampling,
        other=without_attention - linears - vocabulary,
    )


def _without_attention(decoder: Decoder) -> float:
    """Milliseconds of a forward pass whose attention returns its queries and writes nothing."""
    with _skipped_attention() as unread:
        logits = decoder.logits()
    return _evaluate(lambda: [logits, *unread])


@contextmanager
def _skipped_attention() -> Iterator[list[mx.array]]:
    """Yields the new keys and values of each layer, which must be computed although nothing reads them."""
    unread: list[mx.array] = []

    def skip(queries: mx.array, keys: mx.array, values: mx.array, **_: Any) -> mx.array:
        unread.extend((keys, values))
        return queries

    with patch.object(llama, "scaled_dot_product_attention", skip):
        yield unread


def _evaluate(build: Build) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    mx.eval(build())
    return _milliseconds_since(started)


def _milliseconds_since(started: float) -> float:
    return 1e3 * (time.perf_counter() - started)
