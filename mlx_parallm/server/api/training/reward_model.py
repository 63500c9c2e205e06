"""`/v1/training/reward_model`: a reward model of the preferences that were collected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import Depends
from pydantic import Field

from mlx_parallm.errors import InvalidRequestError, TrainingFailedError
from mlx_parallm.rl.reward_models.cards import RewardModelCard, RewardModelSpec
from mlx_parallm.server.access.roles import Role
from mlx_parallm.server.access.views import shared
from mlx_parallm.server.api.fields import INT32_MAX, WireInput, WireOutput
from mlx_parallm.server.http.body import json_body
from mlx_parallm.server.request import MAX_ADAPTER_NAME
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep

if TYPE_CHECKING:
    from mlx_parallm.rl.reward_models.trainer import RewardModelTrainer

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


class RewardModelObject(WireOutput):
    """A reward model that was trained. Its folder is on the disk."""

    status: Literal["success"]
    name: str
    """Its name."""
    scoring_function: str
    """The scorer that it is."""
    preferences: int
    """Preferences that it was trained on."""
    steps: int
    """Optimizer steps."""
    loss: float
    """Mean loss of the last epoch, in nats; 0.69 is chance."""
    agreement: float
    """Share of the preferences that it agreed with before each step of the last epoch."""
    held_out: int
    """Preferences that it was tested on."""
    held_out_agreement: float | None
    """Share of them that it agrees with; 0.5 is chance. null if none was held out."""
    held_out_low: float | None
    """Lower end of the 95 % interval of that share."""
    held_out_high: float | None
    """Upper end of it."""


@router.post(
    "/v1/training/reward_model",
    role=Role.TRAIN,
    audited=True,
    examples={"a tenth held out": {"name": "polite", "held_out": 0.1}},
)
async def train_reward_model(
    body: Annotated[RewardModelBody, Depends(json_body(RewardModelBody))], services: ServicesDep
) -> RewardModelObject:
    """Trains a reward model on the preferences that were sent to this run, beside requests and updates. The answer
    comes when it can score, which may take minutes; it is finished even if the client disconnects."""
    models: RewardModelTrainer = services.require_extra("reward_models")
    if services.key.adapters is not None:
        raise shared("A reward model learns from all preferences: it")
    spec = RewardModelSpec(body.name, body.held_out, body.epochs, body.batch_size, body.learning_rate, body.seed)
    try:
        return reward_model_object(await services.lifecycle.run_to_end(models.train(spec)))
    except TrainingFailedError as error:
        raise InvalidRequestError(f"The reward model could not be trained: {error}", param="learning_rate") from error


def reward_model_object(card: RewardModelCard) -> RewardModelObject:
    return RewardModelObject(
        status="success",
        name=card.name,
        scoring_function=f"reward_model:{card.name}",
        preferences=card.preferences,
        steps=card.steps,
        loss=card.loss,
        agreement=card.agreement,
        held_out=card.held_out,
        held_out_agreement=card.held_out_agreement,
        held_out_low=card.low,
        held_out_high=card.high,
    )
