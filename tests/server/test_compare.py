"""`/v1/training/compare` over HTTP, and which requests belong together while versions are compared."""

import pytest
from server.asking import refusal

from mlx_parallm.errors import ConflictError, UnknownModelError
from mlx_parallm.extras.competition.comparison import ComparisonSpec

COMPARE, STOP = "/v1/training/compare", "/v1/training/compare/stop"
COMPLETIONS = "/v1/completions"
RUNNING = {
    "lora_adapter": "policy",
    "live": "policy@2",
    "candidate": "policy@1",
    "automatic": False,
    "verdict": "running",
    "reason": "",
    "share": 0.2,
    "live_requests": 0,
    "candidate_requests": 0,
    "live_rewards": 0,
    "candidate_rewards": 0,
    "live_mean": 0.25,
    "candidate_mean": None,
    "p_better": 1.0,
    "p_worse": 1.0,
    "clipped": 0,
    "started": "2027-01-15T08:00:00.000Z",
    "ended": None,
}


@pytest.fixture(autouse=True)
def candidate(adapters):
    adapters.publish("policy")


async def test_a_comparison_is_started_read_and_stopped(client, competition):
    assert (await client.get(COMPARE)).json() == {"object": "list", "data": []}
    response = await client.post(COMPARE, json={"candidate": "policy@1"})
    assert (response.status_code, response.json()) == (200, RUNNING)
    assert (await client.get(COMPARE)).json()["data"] == [RUNNING]
    stopped = (await client.post(STOP)).json()
    assert (stopped["verdict"], stopped["reason"], stopped["ended"]) == ("stopped", "asked", "2027-01-15T08:01:00.000Z")
    assert competition.asked == [(None, ComparisonSpec("policy@1")), (None, None)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "candidate"),
        ({"candidate": ""}, "candidate"),
        ({"candidate": "x" * 161}, "candidate"),
        ({"candidate": "x", "share": 0.6}, "share"),
        ({"candidate": "x", "share": 0}, "share"),
        ({"candidate": "x", "smallest_effect": 0}, "smallest_effect"),
        ({"candidate": "x", "max_rewards": 0}, "max_rewards"),
        ({"candidate": "x", "max_hours": 9000}, "max_hours"),
        ({"candidate": "x", "shares": 0.1}, "shares"),
    ],
)
async def test_a_bad_body_names_its_field(client, competition, body, param):
    await refusal(client.post(COMPARE, json=body), 400, param=param)
    assert not competition.asked


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (UnknownModelError("no checkpoint"), 404, "candidate"),
        (ConflictError("Versions of 'policy' are being compared", "lora_adapter"), 409, "lora_adapter"),
    ],
)
async def test_what_cannot_be_compared_is_refused(client, competition, error, status, param):
    competition.error = error
    await refusal(client.post(COMPARE, json={"candidate": "x"}), status, param=param)


async def test_metrics_tell_of_comparisons(client, competition):
    competition.verdicts = {"promoted": 2}
    await client.post(COMPARE, json={"candidate": "policy@1"})
    metrics = (await client.get("/metrics")).text
    assert 'mlx_parallm_rl_comparison_running{adapter="policy"} 1.0' in metrics
    assert 'mlx_parallm_rl_comparison_reward_mean{adapter="policy",version="2"} 0.25' in metrics
    assert 'mlx_parallm_rl_comparisons_total{adapter="policy",verdict="promoted"} 2.0' in metrics


@pytest.mark.parametrize(
    ("fields", "headers", "key"),
    [
        ({"user": "ann"}, {}, "ann"),
        ({"safety_identifier": "ann"}, {}, "ann"),
        ({"user": "ann"}, {"X-Session-Id": "s1"}, "s1"),
        ({"user": "ann", "collect_trajectory": True, "episode_id": "e1"}, {"X-Session-Id": "s1"}, "e1"),
        ({"user": "ann", "collect_trajectory": True, "episode_id": "e1", "group_id": "g1"}, {}, "g1"),
    ],
)
async def test_requests_that_belong_together_have_one_key(client, adapters, fields, headers, key):
    for _ in range(2):
        response = await client.post(COMPLETIONS, json={"prompt": "x", **fields}, headers=headers)
        assert response.status_code == 200, response.text
    assert adapters.keys == [key, key]
