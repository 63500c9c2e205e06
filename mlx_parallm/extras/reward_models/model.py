"""RewardModel: a scalar head on the hidden states of the served base model with an adapter of its own.

    prompt and answer ──base trunk + LoRA──▶ hidden state of the last token [D] ── · head ──▶ reward

The base is shared with everything else and stays as it is. Factors and head are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LoRAPair, lora_scale
from mlx_parallm.config import ModelConfig
from mlx_parallm.extras.reward_models.folder import RewardModelWeights
from mlx_parallm.train.branches import Branch
from mlx_parallm.train.context import LoraSpan, Params
from mlx_parallm.train.model import TrainableModel, TrunkPass
from mlx_parallm.train.packing import Row, indices_of, laid_out
from mlx_parallm.train.policy import new_factors

HEAD = "score"
"""The path of the head among the parameters, which has one array: {"weight": [D]}."""


@dataclass(frozen=True, eq=False)
class RewardModel:
    """The parameters of a reward model, on the device. Nothing writes to its arrays.

    `params`: LoRA factors by path, and the head at the path `HEAD`. `scale`: of the products of the factors.
    """

    params: Params
    scale: float
    rslora: bool = False

    @classmethod
    def new(cls, layout: AdapterLayout, lora: ModelConfig, seed: int) -> RewardModel:
        """One whose head and b factors are zero, so that all rewards are zero. The base model's own head is not a part
        of reward models, so it gets no factors. Experts get none either, because PEFT's format has no place for them.

        Raises:
            ConfigError: the model has no linear layer with the name of a target module.
        """
        head = layout.head.target if layout.head is not None else ""
        targets = tuple(target for target in lora.lora_target_modules if target != head)
        plain = replace(layout, linears={path: spec for path, spec in layout.linears.items() if not spec.experts})
        factors = new_factors(plain, lora.model_copy(update={"lora_target_modules": targets}), seed)
        scale = lora_scale(lora.lora_alpha, lora.lora_rank, lora.lora_rslora)
        return cls({**factors, HEAD: {"weight": mx.zeros(layout.hidden)}}, scale, lora.lora_rslora)

    @classmethod
    def of(cls, weights: RewardModelWeights) -> RewardModel:
        """That of a file. The scales of its pairs may differ, so they are multiplied into b."""
        factors = {
            path: {"a": mx.array(pair.a), "b": mx.array(pair.b) * pair.scale}
            for path, pair in weights.adapter.pairs.items()
        }
        model = cls({**factors, HEAD: {"weight": mx.array(weights.head)}}, 1.0)
        mx.eval(model.params)
        return model

    def weights(self) -> RewardModelWeights:
        """Copies in host memory, for files."""
        pairs = {
            path: LoRAPair(np.array(pair["a"]), np.array(pair["b"]), self.scale)
            for path, pair in self.params.items()
            if path != HEAD
        }
        return RewardModelWeights(AdapterWeights(pairs, self.rslora), np.array(self.params[HEAD]["weight"]))

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for pair in self.params.values() for array in pair.values())


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The tokens of n rows as one batch, in which what rows begin with in common is there once.

    tokens: int32 [N].  branch: how they lie.  last: int32 [n], where the last token of each row lies.
    """

    tokens: mx.array
    branch: Branch
    last: mx.array

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> PackedRows:
        branch, order = laid_out([Row.of(row) for row in rows])
        tokens, last = np.zeros(branch.tokens, np.int32), np.zeros(len(rows), np.int32)
        for row, pieces in zip(order, branch.rows(), strict=True):
            at = indices_of(pieces)[: len(rows[row])]
            tokens[at] = rows[row]
            last[row] = at[-1]
        return cls(mx.array(tokens), branch, mx.array(last))


def rewards(
    trainable: TrainableModel, params: Params, scale: float, rows: PackedRows, learns: bool = False
) -> tuple[mx.array, TrunkPass]:
    """The rewards of the rows, float32 [n], and the pass that gives them. Everything is lazy. `learns`: see
    `TrainableModel.trunk`."""
    trunk = trainable.trunk(rows.tokens, [rows.branch], [LoraSpan(rows.tokens.size, params, scale)], learns)
    last = trunk.hidden[rows.last].astype(mx.float32)
    return (last * params[HEAD]["weight"]).sum(-1), trunk


def preference_loss(chosen: mx.array, rejected: mx.array) -> mx.array:
    """The sum of -log σ(r_chosen - r_rejected), in nats: the negative log-likelihood of the preferences if P(chosen is
    preferred) = σ(r_chosen - r_rejected), as Bradley and Terry (1952) model comparisons. It is equation 1 of Ouyang et
    al. (arXiv 2203.02155)."""
    return mx.logaddexp(mx.array(0.0), rejected - chosen).sum()
