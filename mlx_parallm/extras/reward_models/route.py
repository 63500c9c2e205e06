"""`/v1/training/reward_model`: a reward model of the preferences that were collected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Depends
from pydantic import Field

from mlx_parallm.errors import InvalidRequestError, TrainingFailedError
from mlx_parallm.extras.reward_models.cards import RewardModelCard, RewardModelSpec
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.fields import INT32_MAX, WireInput
from mlx_parallm.server.body import json_body
from mlx_parallm.server.request import MAX_ADAPTER_NAME
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep
from mlx_parallm.server.views import shared

if TYPE_CHECKING:
    from mlx_parallm.extras.reward_models.trainer import RewardModelTrainer

MAX_EPOCHS, MAX_BATCH = 100, 1024

router = Router()


class RewardModelBody(WireInput):
    """The reward model to train."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME)]
    """Its name. It becomes the scorer `reward_model:<name>`, and a folder of --adapter-dir."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the prompts whose preferences it is tested on, and not trained on. 0 for none."""
    epochs: Annotated[int, Field(ge=1, le=MAX_EPOCHS)] = 2
    """Passes over the preferences."""
    batch_size: Annotated[int, Field(ge=1, le=MAX_BATCH)] = 16
    """Preferences of one step."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 5e-4
    """Peak learning rate; it rises over the first tenth of the steps and then falls to 0."""
    seed: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    """Of the initial weights, of the order of the preferences, and of what is held out."""


@router.post(
    "/v1/training/reward_model",
    role=Role.TRAIN,
    audited=True,
    examples={"a tenth held out": {"name": "polite", "held_out": 0.1}},
)
async def train_reward_model(
    body: Annotated[RewardModelBody, Depends(json_body(RewardModelBody))], services: ServicesDep
) -> RewardModelCard:
    """Trains a reward model on the preferences that were sent to this run, beside requests and updates. The answer
    comes when it can score, which may take minutes; it is finished even if the client disconnects."""
    models: RewardModelTrainer = services.require_extra("reward_models")
    if services.key.adapters is not None:
        raise shared("A reward model learns from all preferences: it")
    spec = RewardModelSpec(body.name, body.held_out, body.epochs, body.batch_size, body.learning_rate, body.seed)
    try:
        return await services.lifecycle.run_to_end(models.train(spec))
    except TrainingFailedError as error:
        raise InvalidRequestError(f"The reward model could not be trained: {error}", param="learning_rate") from error
