"""RewardModelInTraining: the parameters of a reward model, and the optimizer that changes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import mlx.core as mx
from mlx.optimizers import clip_grad_norm

from mlx_parallm.config import OptimizerConfig
from mlx_parallm.errors import TrainingFailedError
from mlx_parallm.extras.reward_models.model import RewardModel
from mlx_parallm.train.policy import new_optimizer

Gradients = Mapping[str, Mapping[str, mx.array]]


class RewardModelInTraining:
    """A reward model and its AdamW. Device thread only. `model`: as it is after the last step."""

    def __init__(self, model: RewardModel, settings: OptimizerConfig) -> None:
        self.model = model
        self._settings = settings
        self._optimizer = new_optimizer(settings)
        self._optimizer.init(model.params)
        mx.eval(model.params, self._optimizer.state)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters and of AdamW's two means of gradients."""
        return 3 * self.model.nbytes

    def step(self, gradients: Gradients) -> None:
        """Makes one optimizer step, with gradients that are scaled down if their norm is too large.

        Raises:
            TrainingFailedError: they are not finite. The model is as before.
        """
        gradients, norm = clip_grad_norm(gradients, self._settings.max_grad_norm)
        if not math.isfinite(norm.item()):
            raise TrainingFailedError("the gradients of the reward model are not finite: lower the learning rate")
        params = self._optimizer.apply_gradients(gradients, self.model.params)
        mx.eval(params, self._optimizer.state)
        self.model = replace(self.model, params=params)
