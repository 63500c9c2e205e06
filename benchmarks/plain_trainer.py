"""LoRA training as anyone would write it with mlx-lm: padded rows through the model, logits at all positions.

mlx-lm's own LoRA layers and its own checkpointing. The loss is grpo's where the trainer's logprobs are π_old.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn
from mlx.optimizers import AdamW
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers
from rl_batch import GROUP, LORA

from mlx_parallm.rl.samples import Sample

ROWS = GROUP
"""Of one forward and backward. All 32 together are no faster, and their logits take gigabytes."""

TARGETS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
CLIP = 0.2
SUM_BLOCK = 256

Gradients = Mapping[str, mx.array]
"""By the names of mlx-lm's parameters: `<path of the linear>.lora_a`, `.lora_b`."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """tokens: int32 [B, T], padded on the right. mask: fp32 [B, T - 1], 1 where the next token is trained.
    advantages: fp32 [B, 1].
    """

    tokens: mx.array
    mask: mx.array
    advantages: mx.array


class PlainTrainer:
    """Trains a model of mlx-lm's, which has no adapters as yet, in place; AdamW in float32."""

    def __init__(self, model: nn.Module) -> None:
        model.freeze()
        config = {"rank": LORA.rank, "scale": LORA.alpha / LORA.rank, "dropout": 0.0, "keys": TARGETS}
        linear_to_lora_layers(model, len(model.layers), config)
        mx.eval(model.parameters())
        self._model = model
        self._factors: Any = model.trainable_parameters()
        self._optimizer = AdamW(learning_rate=1e-5, betas=[0.9, 0.95], bias_correction=True)

    def put(self, params: Mapping[str, Mapping[str, mx.array]]) -> None:
        """Goes on from these factors, {"a", "b"} by path."""
        named = [(f"{path}.lora_{name}", array) for path, pair in params.items() for name, array in pair.items()]
        self._factors = tree_unflatten(named)

    def update(self, samples: Sequence[Sample], checkpointed: bool, precise: bool = False) -> Gradients:
        """One optimizer step; its gradients, evaluated.

        Args:
            checkpointed: by mlx-lm's `grad_checkpoint`.
            precise: sums over the vocabulary by blocks. MLX's own sum on a CPU is off by up to 1e-4, too much for a
                comparison; nobody would pay for this one otherwise.
        """
        total: Any = None
        for start in range(0, len(samples), ROWS):
            rows = _rows(samples[start : start + ROWS])
            with _checkpointing(self._model.layers[0]) if checkpointed else nullcontext():
                gradients = self._gradients(rows, len(samples), precise)
            total = gradients if total is None else tree_map(mx.add, total, gradients)
            mx.eval(total)
        self._factors = self._optimizer.apply_gradients(total, self._factors)
        self._model.update(self._factors)
        mx.eval(self._factors, self._optimizer.state)
        return dict(tree_flatten(total))

    def _gradients(self, rows: _Rows, sequences: int, precise: bool) -> Any:
        def objective(factors: Any) -> mx.array:
            self._model.update(factors)
            return self._loss(rows, precise) / sequences

        return mx.value_and_grad(objective)(self._factors)[1]

    def _loss(self, rows: _Rows, precise: bool) -> mx.array:
        """Sum over rows of the mean over a row's trained tokens."""
        logits = self._model(rows.tokens[:, :-1]).astype(mx.float32)
        logprobs = logits - (_normaliser(logits) if precise else mx.logsumexp(logits, -1, keepdims=True))
        logp = mx.take_along_axis(logprobs, rows.tokens[:, 1:, None], -1).squeeze(-1)
        ratio = mx.exp(logp - mx.stop_gradient(logp))
        held = mx.clip(ratio, 1 - CLIP, 1 + CLIP)
        losses = -mx.minimum(ratio * rows.advantages, held * rows.advantages) * rows.mask
        return (losses.sum(-1) / rows.mask.sum(-1)).sum()


def _rows(samples: Sequence[Sample]) -> _Rows:
    longest = max(sample.tokens for sample in samples)
    tokens = [[*each.prompt_ids, *each.completion_ids, *([0] * (longest - each.tokens))] for each in samples]
    starts = [len(each.prompt_ids) - 1 for each in samples]
    trained = [range(start, start + len(each.completion_ids)) for start, each in zip(starts, samples, strict=True)]
    mask = [[float(place in places) for place in range(longest - 1)] for places in trained]
    return _Rows(mx.array(tokens, mx.int32), mx.array(mask), mx.array([[each.advantage] for each in samples]))


def _normaliser(logits: mx.array) -> mx.array:
    """log Σ exp over the vocabulary, summed by blocks: [..., V] → [..., 1]."""
    most = mx.stop_gradient(logits.max(-1, keepdims=True))
    weights = mx.exp(logits - most)
    padding = -weights.shape[-1] % SUM_BLOCK
    blocks = mx.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, padding)])
    return mx.log(blocks.reshape(*weights.shape[:-1], -1, SUM_BLOCK).sum(-1).sum(-1, keepdims=True)) + most


@contextmanager
def _checkpointing(layer: nn.Module) -> Iterator[None]:
    """mlx-lm's way rewrites the class of the layers: undone at the end, for other models have layers of that class."""
    call = type(layer).__call__
    grad_checkpoint(layer)
    try:
        yield
    finally:
        type(layer).__call__ = call
