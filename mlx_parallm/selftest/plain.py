"""PlainModel: a model as mlx-lm runs it alone, with mlx-lm's own LoRA layers. The reference of all checks.

Nothing of the engine takes part: no batch, no KV pool, no adapter bank. The weights are loaded a second time, in the
form in which this device serves them. Every method runs on the device thread, which owns the arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import get_total_parameters
from numpy.typing import NDArray

from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair
from mlx_parallm.model.device import on_cpu
from mlx_parallm.model.loading import load, materialize

Logprobs = NDArray[np.float32]
Gradients = dict[str, NDArray[np.float32]]
Factors = Mapping[str, Mapping[str, mx.array]]
"""LoRA factors by the path of their linear, as {"a": …, "b": …}."""

_SUMMED_AT_ONCE = 1024
"""Tokens of the vocabulary whose probabilities are added up at once."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt, an answer to it, and the advantage of that answer."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    advantage: float = 1.0


class PlainModel:
    """The model at a path; None is the bundled one.

    Args:
        stored: keep weights quantized as they are stored, also on a CPU, which serves them as float32.
    """

    def __init__(self, path: str | None, stored: bool = False) -> None:
        loaded = load(path, dequantize=on_cpu() and not stored, progress=False)
        self.model = loaded.model
        if stored and on_cpu():
            self.model.update(tree_map(_widened, self.model.parameters()))
        materialize(self.model, loaded.name, show=False)
        self.parameters = get_total_parameters(self.model)

    def logprobs(self, tokens: Sequence[int], adapter: AdapterWeights | None = None) -> Logprobs:
        """Logprobs of every possible next token after each of the tokens, in nats: float32 [T, vocab]."""
        with self.adapted(adapter):
            return np.array(_normalised(self.model(mx.array([list(tokens)]))[0]))

    def logprobs_in_parts(self, tokens: Sequence[int], parts: Sequence[int]) -> Logprobs:
        """The same, computed in parts of so many tokens with mlx-lm's own KV cache."""
        cache, found, start = make_prompt_cache(self.model), [], 0
        for length in parts:
            logits = self.model(mx.array([list(tokens[start : start + length])]), cache=cache)[0]
            found.append(np.array(_normalised(logits)))
            start += length
        return np.concatenate(found)

    def answer_logprobs(self, answered: Answered, adapter: AdapterWeights) -> list[float]:
        """Logprobs of an answer's tokens, in nats."""
        rows = self.logprobs([*answered.prompt, *answered.tokens[:-1]], adapter)[len(answered.prompt) - 1 :]
        return [float(row[token]) for row, token in zip(rows, answered.tokens, strict=True)]

    def gradients(
        self, batch: Sequence[Answered], adapter: AdapterWeights, padding: int = 0, dtype: mx.Dtype = mx.float32
    ) -> Gradients:
        """Gradients of the policy-gradient loss of GRPO by the adapter's factors, as MLX differentiates plain passes.

        The loss is the mean over the answers of -advantage · (mean logprob of the answer's tokens).

        Args:
            padding: tokens after each answer, which change the shapes of a pass and nothing else.
            dtype: of the products of the factors.
        """
        factors: Factors = {
            path: {"a": mx.array(pair.a), "b": mx.array(pair.b)} for path, pair in adapter.pairs.items()
        }
        with self.adapted(adapter) as layers:

            def loss(params: Factors) -> mx.array:
                for path, layer in layers.items():
                    layer.lora_a, layer.lora_b = (params[path][name].astype(dtype) for name in "ab")
                means = [each.advantage * self._mean_logprob(each, padding) for each in batch]
                return -mx.stack(means).mean()

            found = mx.grad(loss)(factors)
            mx.eval(found)
        return {name: np.array(leaf) for name, leaf in tree_flatten(found)}

    def _mean_logprob(self, answered: Answered, padding: int) -> mx.array:
        tokens = [*answered.prompt, *answered.tokens, *[0] * padding]
        logits = self.model(mx.array([tokens]))[0]
        start = len(answered.prompt) - 1
        rows = _normalised(logits[start : start + len(answered.tokens)])
        return mx.take_along_axis(rows, mx.array(answered.tokens)[:, None], -1).mean()

    @contextmanager
    def adapted(self, adapter: AdapterWeights | None) -> Iterator[dict[str, LoRALinear]]:
        """While the block runs, the adapter's linears are mlx-lm's LoRA layers."""
        pairs = {} if adapter is None else adapter.pairs
        linears = {path: module for path, module in self.model.named_modules() if path in pairs}
        layers = {path: _lora(linear, pairs[path]) for path, linear in linears.items()}
        self.model.update_modules(tree_unflatten(list(layers.items())))
        try:
            yield layers
        finally:
            self.model.update_modules(tree_unflatten(list(linears.items())))


def _lora(linear: nn.Module, pair: LoRAPair) -> LoRALinear:
    layer: Any = LoRALinear.from_base(linear, r=pair.rank, scale=pair.scale)
    layer.lora_a, layer.lora_b = mx.array(pair.a), mx.array(pair.b)
    return layer


def _normalised(logits: mx.array) -> mx.array:
    """Logits [T, vocab] → logprobs, float32.

    The vocabulary is summed in parts, because a float32 sum of all its probabilities at once is off by 1e-4 or more.
    """
    wide = logits.astype(mx.float32)
    starts = range(0, wide.shape[-1], _SUMMED_AT_ONCE)
    parts = [mx.logsumexp(wide[:, start : start + _SUMMED_AT_ONCE], -1, keepdims=True) for start in starts]
    return wide - mx.logsumexp(mx.concatenate(parts, -1), -1, keepdims=True)


def _widened(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
