"""How far two correct forward passes may differ by rounding.

A sum of floating-point numbers depends on the order of its terms, and the order on the shapes of the arrays. The limits
are those of the project's tests: with float32 activations, logprobs agree to 1e-5 for a tiny model and to 1e-4 for one
like the bundled model. A device that computes with fewer bits (half precision, or TF32 products on NVIDIA GPUs) cannot
keep them. So the plain model is also compared with itself in another shape, on the device of the test, and the limit is
four times that difference if this is more. Over bfloat16, where the engine trains with products of the factors in
bfloat16, one of the two has such products. Nothing of the engine takes part in that measurement, so a fault of the
engine cannot raise the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.weights import AdapterLayout
from mlx_parallm.core.engine import ModelCard
from mlx_parallm.selftest.inputs import answers, random_adapter, random_tokens
from mlx_parallm.selftest.plain import Gradients, PlainModel

TINY_PARAMETERS = 10**7
_TINY, _OTHER = 1e-5, 1e-4
_TIMES_MEASURED = 4.0
_FLOAT32_MOST, _HALF_MOST = 5e-3, 0.5
_PARTS = (64, 24, *[1] * 8)
"""Tokens of the parts in which the plain model computes a sequence that it also computes at once."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest difference that counts as rounding. `source`: where the number comes from."""

    value: float
    source: str

    def times(self, factor: float, why: str) -> Limit:
        """This limit for a quantity that rounding changes `factor` times as much, for the reason `why`."""
        return Limit(self.value * factor, f"{factor:g} times ({why}) the limit of logprobs, which is: {self.source}")


@dataclass(frozen=True, slots=True)
class Rounding:
    """What was measured of the plain model, and what follows from it.

    Attributes:
        logprobs: the largest difference of logprobs, in nats, between two of its forward passes.
        gradients: that of its gradients, as a share of the largest gradient.
        parameters: of the model.
        float32: the activations are float32.
    """

    logprobs: float
    gradients: float
    parameters: int
    float32: bool

    @property
    def of_logprobs(self) -> Limit:
        """For logprobs, in nats."""
        return self._limit(self.logprobs)

    @property
    def of_gradients(self) -> Limit:
        """For gradients, as a share of the largest gradient.

        With float32 activations, what was measured of logprobs counts too. A device that uses TF32 rounds the products
        of matrices but not those with a single row. Logprobs were measured with single rows, and gradients were not.
        """
        return self._limit(max(self.gradients, self.logprobs) if self.float32 else self.gradients)

    @property
    def most(self) -> Limit:
        """For the measured rounding of logprobs itself."""
        if self.float32:
            return Limit(_FLOAT32_MOST, "float32 activations, whose products a GPU may round to 10 bits (TF32)")
        return Limit(_HALF_MOST, "activations of 16 bits")

    def _limit(self, measured: float) -> Limit:
        expected = _TINY if self.parameters < TINY_PARAMETERS else _OTHER
        if not _TIMES_MEASURED * measured > expected:
            size = "a tiny model" if self.parameters < TINY_PARAMETERS else "a model of this size"
            return Limit(expected, f"{expected:g} for {size} with float32 activations, as in the project's tests")
        source = f"4 times the rounding of mlx-lm's own forward pass on this device, {measured:.2g}"
        return Limit(_TIMES_MEASURED * measured, source)


def measured(plain: PlainModel, layout: AdapterLayout, card: ModelCard) -> Rounding:
    """Compares the plain model with itself in other shapes. On the device thread."""
    tokens = random_tokens(card.vocab_size, sum(_PARTS), seed=1)
    following = [*tokens[1:], 0]
    whole, parts = plain.logprobs(tokens), plain.logprobs_in_parts(tokens, _PARTS)
    places = np.arange(len(tokens))
    logprobs = np.abs(whole - parts)[places, following].max()
    adapter, batch = random_adapter(layout, seed=1), answers(card.vocab_size, (5, 9), seed=1)
    products = mx.bfloat16 if card.dtype == "bfloat16" else mx.float32
    padded = plain.gradients(batch, adapter, padding=7, dtype=products)
    gradients = relative(plain.gradients(batch, adapter), padded)
    return Rounding(float(logprobs), gradients, plain.parameters, card.dtype == "float32")


def relative(found: Gradients, expected: Gradients) -> float:
    """The largest difference of two gradients, as a share of the largest number in `expected`.

    Not a number if they are of other parameters, or if all that is expected is zero.
    """
    largest = max(float(np.abs(leaf).max()) for leaf in expected.values())
    if found.keys() != expected.keys() or not largest > 0:
        return float("nan")
    return max(float(np.abs(found[name] - leaf).max()) for name, leaf in expected.items()) / largest
