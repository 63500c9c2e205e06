"""`/v1/training/average` over HTTP. What becomes of an average is in `tests/extras/averages/test_averages.py`."""

import pytest
from server.asking import refusal

from mlx_parallm.extras.averages.service import AverageSpec

AVERAGE = "/v1/training/average"
GOOD = {"adapters": ["a", "b"], "lora_adapter": "mean"}


@pytest.fixture(autouse=True)
def members(adapters):
    for name in GOOD["adapters"]:
        adapters.publish(name)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"adapters": ["a"]}, "adapters"),
        ({"adapters": ["a"] * 65}, "adapters"),
        ({"adapters": ["a", ""]}, "adapters[1]"),
        ({"adapters": ["a", "x" * 161]}, "adapters[1]"),
        ({"adapters": "a,b"}, "adapters"),
        ({"weights": ["half", 1]}, "weights[0]"),
        ({"rank": 0}, "rank"),
        ({"rank": 2**40}, "rank"),
        ({"lora_adapter": ""}, "lora_adapter"),
        ({"lora_adapter": None}, "lora_adapter"),
        ({"lora_name": "mean"}, "lora_name"),
    ],
)
async def test_a_bad_body_names_its_field(client, averages, changes, param):
    await refusal(client.post(AVERAGE, json=GOOD | changes), 400, param=param)
    assert not averages.asked


async def test_an_average_that_is_held_is_an_answer_that_says_why(client, averages):
    response = await client.post(AVERAGE, json=GOOD | {"weights": [5, 3], "rank": 8})
    assert (response.status_code, response.json()) == (
        200,
        {
            "status": "held",
            "reason": "too low",
            "lora_adapter": None,
            "adapters": ["a@1", "b@1"],
            "rank": 8,
            "full_rank": 16,
            "error": 0.25,
            "worst": "model.layers.0.mlp.up_proj",
            "worst_error": 0.5,
            "evaluation": None,
            "checkpoint": None,
        },
    )
    assert averages.asked == [AverageSpec(["a", "b"], "mean", [5.0, 3.0], 8)]
