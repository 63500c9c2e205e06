"""A straightforward LoRA trainer with mlx-lm: padded rows, logits at all positions.

It uses mlx-lm's own LoRA layers. The loss is that of GRPO with the trainer's logprobs as π_old.
Updates of this project's trainer are measured beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import AdamW
from mlx.utils import tree_flatten, tree_map

from mlx_parallm.train.data import Datum

_CLIP = 0.2

Gradients = Mapping[str, mx.array]
"""Gradients by the names of mlx-lm's parameters: `<path of the linear>.lora_a` and `.lora_b`."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """One micro-batch.

    tokens: int32 [B, T], padded on the right. mask: fp32 [B, T - 1], 1 if the next token is trained. advantages: of the
    next token, fp32 [B, T - 1].
    """

    tokens: mx.array
    mask: mx.array
    advantages: mx.array


class PlainTrainer:
    """Trains the LoRA layers of an mlx-lm model in place, with AdamW in float32.

    Args:
        model: it has mlx-lm's LoRA layers already.
        rows: of one forward and backward pass. More are no faster, and their logits take gigabytes.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        model.freeze()
        for _, module in model.named_modules():
            if "lora_a" in module:
                module.unfreeze(recurse=False, keys=["lora_a", "lora_b"])
        self._model, self._rows = model, rows
        self._factors: Any = model.trainable_parameters()
        self._optimizer = AdamW(learning_rate=1e-5, betas=[0.9, 0.95], bias_correction=True)
        self._optimizer.init(self._factors)
        mx.eval(model.parameters(), self._optimizer.state)

    def update(self, samples: Sequence[Datum]) -> Gradients:
        """Makes one optimizer step. Returns its gradients, evaluated."""
        total: Any = None
        for start in range(0, len(samples), self._rows):
            gradients = self._gradients(_rows(samples[start : start + self._rows]), len(samples))
            total = gradients if total is None else tree_map(mx.add, total, gradients)
            mx.eval(total)
        self._factors = self._optimizer.apply_gradients(total, self._factors)
        self._model.update(self._factors)
        mx.eval(self._factors, self._optimizer.state)
        return dict(tree_flatten(total))

    def _gradients(self, rows: _Rows, sequences: int) -> Any:
        def objective(factors: Any) -> mx.array:
            self._model.update(factors)
            return self._loss(rows) / sequences

        return mx.value_and_grad(objective)(self._factors)[1]

    def _loss(self, rows: _Rows) -> mx.array:
        """The sum over rows of the mean loss over a row's trained tokens."""
        logits = self._model(rows.tokens[:, :-1]).astype(mx.float32)
        logprobs = logits - self._normaliser(logits)
        logp = mx.take_along_axis(logprobs, rows.tokens[:, 1:, None], -1).squeeze(-1)
        ratio = mx.exp(logp - mx.stop_gradient(logp))
        held = mx.clip(ratio, 1 - _CLIP, 1 + _CLIP)
        losses = -mx.minimum(ratio * rows.advantages, held * rows.advantages) * rows.mask
        return (losses.sum(-1) / rows.mask.sum(-1)).sum()

    def _normaliser(self, logits: mx.array) -> mx.array:
        """logsumexp over the vocabulary: [..., V] → [..., 1]."""
        return mx.logsumexp(logits, -1, keepdims=True)


def _rows(samples: Sequence[Datum]) -> _Rows:
    longest = max(len(sample.token_ids) for sample in samples)

    def table(rows: Sequence[Sequence[float]]) -> mx.array:
        return mx.array([[*row, *([0] * (longest - len(row)))] for row in rows])

    tokens = table([each.token_ids for each in samples])
    mask, advantages = table([each.loss_weights for each in samples]), table([each.advantages for each in samples])
    return _Rows(tokens, mask[:, 1:], advantages[:, 1:])
