"""The plain trainer with LoRA layers of all linears, as the benchmarks of training run it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers

from benchmarks.lib.training.batch import GROUP, LORA
from mlx_parallm.bench.plain_trainer import Gradients, PlainTrainer
from mlx_parallm.train.data import Datum

TARGETS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
_SUM_BLOCK = 256


class ComparedTrainer(PlainTrainer):
    """The plain trainer with what a comparison needs: given factors, log-probabilities, exact sums, and mlx-lm's
    checkpointing."""

    _precise = False

    def put(self, params: Mapping[str, Mapping[str, mx.array]]) -> None:
        """Sets the factors: {"a": ..., "b": ...} by the path of the linear."""
        named = [(f"{path}.lora_{name}", array) for path, pair in params.items() for name, array in pair.items()]
        self._factors = tree_unflatten(named)

    def logprobs(self, sample: Datum) -> mx.array:
        """Of the trained tokens, from a plain forward over all tokens of the sample."""
        self._model.update(self._factors)
        logits = self._model(mx.array([sample.token_ids]))[0].astype(mx.float32)
        logprobs = logits - _precise_normaliser(logits)
        trained = mx.array(sample.trained())
        found: mx.array = logprobs[trained - 1, mx.array(sample.token_ids)[trained]]
        return found

    def update(self, samples: Sequence[Datum], checkpointed: bool = False, precise: bool = False) -> Gradients:
        """Makes one optimizer step. Returns its gradients, evaluated.

        Args:
            checkpointed: whether to use mlx-lm's `grad_checkpoint`.
            precise: whether to sum over the vocabulary in blocks. MLX's own sum on a CPU is off by up to 1e-4, too much
                for a comparison. A normal trainer would not pay for this.
        """
        self._precise = precise
        with _checkpointing(self._model.layers[0]) if checkpointed else nullcontext():
            return super().update(samples)

    def _normaliser(self, logits: mx.array) -> mx.array:
        return _precise_normaliser(logits) if self._precise else super()._normaliser(logits)


def plain_trainer(model: nn.Module) -> ComparedTrainer:
    """A trainer of a model that has no adapters yet. A pass computes one group."""
    config = {"rank": LORA.rank, "scale": LORA.alpha / LORA.rank, "dropout": 0.0, "keys": TARGETS}
    linear_to_lora_layers(model, len(model.layers), config)
    return ComparedTrainer(model, rows=GROUP)


def _precise_normaliser(logits: mx.array) -> mx.array:
    """logsumexp over the vocabulary, summed in blocks: [..., V] → [..., 1]."""
    most = mx.stop_gradient(logits.max(-1, keepdims=True))
    weights = mx.exp(logits - most)
    padding = -weights.shape[-1] % _SUM_BLOCK
    blocks = mx.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, padding)])
    return mx.log(blocks.reshape(*weights.shape[:-1], -1, _SUM_BLOCK).sum(-1).sum(-1, keepdims=True)) + most


@contextmanager
def _checkpointing(layer: nn.Module) -> Iterator[None]:
    """Checkpoints layers as mlx-lm does, by changing their class. The change is undone at the end, because other models
    have layers of the same class."""
    call = type(layer).__call__
    grad_checkpoint(layer)
    try:
        yield
    finally:
        type(layer).__call__ = call
