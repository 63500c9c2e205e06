"""`/v1/training/reward_model` over HTTP. What it trains is in `tests/extras/reward_models/test_trainer.py`."""

import pytest
from server.asking import refusal

from mlx_parallm.errors import ConflictError, InvalidRequestError, StorageError, TrainingFailedError
from mlx_parallm.extras.reward_models.cards import RewardModelSpec

ROUTE = "/v1/training/reward_model"


async def test_the_answer_says_how_well_it_agrees(client, reward_models):
    response = await client.post(ROUTE, json={"name": "polite", "epochs": 3, "held_out": 0.2, "seed": 7})
    assert (response.status_code, response.json()) == (
        200,
        {
            "status": "success",
            "name": "polite",
            "scoring_function": "reward_model:polite",
            "preferences": 90,
            "steps": 12,
            "loss": 0.25,
            "agreement": 0.875,
            "held_out": 10,
            "held_out_agreement": 0.9,
            "held_out_low": 0.6,
            "held_out_high": 0.98,
        },
    )
    assert reward_models.asked == [RewardModelSpec("polite", 0.2, 3, 16, 5e-4, 7)]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": None}, "name"),
        ({"held_out": 1.0}, "held_out"),
        ({"held_out": -0.1}, "held_out"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 101}, "epochs"),
        ({"batch_size": 1025}, "batch_size"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"seed": -1}, "seed"),
    ],
)
async def test_a_bad_body_names_its_field(client, reward_models, changes, param):
    await refusal(client.post(ROUTE, json={"name": "polite"} | changes), 400, param=param)
    assert not reward_models.asked


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (ConflictError("it exists", "name"), 409, "name"),
        (InvalidRequestError("too few prompts", "held_out"), 400, "held_out"),
        (TrainingFailedError("not finite"), 400, "learning_rate"),
        (StorageError("the disk is full"), 507, None),
    ],
)
async def test_what_fails_is_told(client, reward_models, error, status, param):
    reward_models.error = error
    await refusal(client.post(ROUTE, json={"name": "polite"}), status, param=param)
