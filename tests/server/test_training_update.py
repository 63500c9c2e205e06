"""`POST /v1/training/update`: what training is given, what the client is told, what is refused."""

import math
from functools import partial

import pytest
from server.asking import post, refused

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.rl.status import UpdateReport

UPDATE = "/v1/training/update"
trajectory = partial(GivenTrajectory, owner="anyone")
GIVEN = {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 257]}


async def test_update_of_the_groups_that_wait(client, training):
    training.report = UpdateReport(AdapterRef("policy", 3), 2, "published", metrics={"loss": 0.5}, checkpoint=None)
    expected = {
        "status": "published",
        "reason": "",
        "lora_adapter": "policy@3",
        "step": 2,
        "metrics": {"loss": 0.5},
        "checkpoint": None,
        "signal": "rewards",
    }
    assert await post(client, UPDATE) == expected
    assert (await client.post(UPDATE)).json() == expected
    assert training.calls == [("update", None, None, True, None)] * 2


async def test_update_of_given_trajectories(client, training):
    given = [
        {**GIVEN, "reward": 1, "group_id": "a", "sampling_logprobs": [-0.5, 0], "temperature": 0.7},
        {**GIVEN, "reward": 0.25, "group_id": "a"},
    ]
    options = {"update_inference": False, "checkpoint_name": "good", "lora_adapter": "policy"}
    await post(client, UPDATE, trajectories=given, **options)
    trajectories = [
        trajectory((1, 2), (3, 257), 1.0, "a", (-0.5, 0.0), 0.7),
        trajectory((1, 2), (3, 257), 0.25, "a"),
    ]
    assert training.calls == [("update", "policy", trajectories, False, "good")]


async def test_texts_are_encoded_once_and_logprobs_and_versions_may_come_with_them(client, training, adapters):
    adapters.publish("policy")
    given = [
        {"prompt": "ab", "output": "c", "logprobs": [-0.5], "reward": 1, "lora_version": "policy@1"},
        {"prompt": "ab", "tokens": [3, 257], "logprobs": [-0.5, 0], "reward": 0, "lora_version": "base"},
    ]
    await post(client, UPDATE, trajectories=given)
    assert training.calls[0][2] == [
        trajectory((97, 98), (99,), 1.0, "", (-0.5,), adapter=AdapterRef("policy", 1)),
        trajectory((97, 98), (3, 257), 0.0, "", (-0.5, 0.0), adapter=BASE_ADAPTER),
    ]


async def test_three_lists_are_a_batch(client, training):
    await post(client, UPDATE, prompts=["a", "b"], outputs=["c", "d"], rewards=[1, 0.5])
    assert training.calls[0][2] == [trajectory((97,), (99,), 1.0), trajectory((98,), (100,), 0.5)]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"trajectories": [{"prompt": "a", "output": "bc", "logprobs": [0]}]}, "trajectories[0].logprobs", "2 tokens"),
        (
            {"trajectories": [{"prompt": "a", "output": "b", "tokens": [1]}]},
            "trajectories[0].completion_token_ids",
            "one",
        ),
        ({"trajectories": [{**GIVEN, "lora_version": "nope@1"}]}, "trajectories[0].lora_version", "nope"),
        ({"prompts": ["a"], "outputs": ["b", "c"], "rewards": [1]}, "outputs", "length"),
        ({"prompts": ["a"], "rewards": [1]}, "prompts", "need each other"),
        ({"prompts": ["a"], "outputs": ["b"], "trajectories": [GIVEN]}, "prompts", "or the three lists"),
    ],
)
async def test_texts_that_do_not_fit_together(client, fields, param, says):
    error = await refused(client, UPDATE, 404 if "version" in param else 400, **fields)
    assert error["param"] == param
    assert says in error["message"]


async def test_a_row_of_tokens_begins_with_its_prompt(client, training):
    row = {"token_ids": [1, 2, 3, 9, 9, 4], "mask": [0, 0, 1, 0, False, True], "group_id": "a", "temperature": 0.5}
    logprobs = [None, 1.0, -0.5, None, 0, -0.25]
    await post(client, UPDATE, trajectories=[{**row, "logprobs": logprobs, "reward": 1}, {**row, "reward": 0}])
    await post(client, UPDATE, trajectories=[{**row, "advantages": [9, 9, 1, 0, 0, -2.5]}, {**row, "advantages": -1}])
    mask = (True, False, False, True)
    rows = [
        trajectory((1, 2), (3, 9, 9, 4), 1.0, "a", (-0.5, 0.0, 0.0, -0.25), 0.5, mask=mask),
        trajectory((1, 2), (3, 9, 9, 4), 0.0, "a", (), 0.5, mask=mask),
    ]
    assert training.calls[0][2] == rows
    assert [(given.reward, given.advantages) for given in training.calls[1][2]] == [
        (None, (1.0, 0.0, 0.0, -2.5)),
        (None, (-1.0,) * 4),
    ]


async def test_a_row_that_ends_with_one_answer_is_that_answer(client, training):
    await post(client, UPDATE, trajectories=[{"token_ids": [1, 2, 3, 4], "mask": [0, 0, 1, 1]}])
    await post(client, UPDATE, trajectories=[{**GIVEN, "advantages": 0.5, "episode_id": "e"}])
    assert training.calls[0][2] == [trajectory((1, 2), (3, 4))]
    assert training.calls[1][2] == [trajectory((1, 2), (3, 257), advantages=(0.5, 0.5), episode_id="e")]


async def test_the_rows_of_an_episode_may_have_its_reward_once(client, training):
    rows = [{**GIVEN, "episode_id": "e"}, {**GIVEN, "episode_id": "e", "reward": 1}, {**GIVEN, "reward": 0}]
    await post(client, UPDATE, trajectories=rows)
    assert [given.reward for given in training.calls[0][2]] == [None, 1.0, 0.0]


ROW = {"token_ids": [1, 2, 3], "mask": [0, 1, 1]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"mask": None}, "mask", "which of token_ids"),
        ({"mask": [0, 1]}, "mask", "each of the 3"),
        ({"mask": [1, 1, 1]}, "mask", "begin with 0"),
        ({"mask": [0, 0, 0]}, "mask", "have a 1"),
        ({"mask": [0, 1, 0.5]}, "mask", "0 and 1"),
        ({"mask": [0, 1, -100]}, "mask", "0 and 1"),
        ({"token_ids": [1, 2, 258]}, "token_ids", "vocabulary"),
        ({"prompt": "a"}, "prompt", "part of token_ids"),
        ({"logprobs": [-1]}, "logprobs", "each of the 3"),
        ({"logprobs": [0, -1, None]}, "logprobs", "null is for context"),
        ({"logprobs": [0, -1, 0.5]}, "logprobs", "at most 0"),
        ({"advantages": [1]}, "advantages", "each of the 3"),
        ({"advantages": "1"}, "advantages", ""),
        ({"token_ids": None}, "prompt_token_ids", "send one of"),
        ({"token_ids": None, "prompt": "a", "output": "b"}, "mask", "needs token_ids"),
        ({"token_ids": None, "mask": None, "prompt": "a", "output": "bc", "advantages": [1]}, "advantages", "2 tokens"),
    ],
    ids=str,
)
async def test_rows_that_do_not_fit_together_are_refused(client, training, fields, param, says):
    error = await refused(client, UPDATE, trajectories=[{**ROW, **fields}])
    assert error["param"].startswith(f"trajectories[0].{param}")
    assert says in error["message"]
    assert not training.calls


async def test_advantages_come_with_all_trajectories_or_with_none(client, training):
    error = await refused(client, UPDATE, trajectories=[ROW, {**ROW, "advantages": 1}])
    assert error["param"] == "trajectories"
    assert not training.calls


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (UpdateReport(AdapterRef("policy", 3), 2, "trained"), ("trained", "", "policy@3")),
        (
            UpdateReport(AdapterRef("policy", 3), 2, "held", "kl over its bound"),
            ("held", "kl over its bound", "policy@3"),
        ),
        (UpdateReport(None, 0, "skipped", "no group is complete"), ("skipped", "no group is complete", None)),
    ],
)
async def test_updates_that_are_not_served_say_why(client, training, report, expected):
    training.report = report
    got = await post(client, UPDATE)
    assert (got["status"], got["reason"], got["lora_adapter"]) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"trajectories": []}, "trajectories"),
        ({"trajectories": {}}, "trajectories"),
        ({"trajectories": [GIVEN] * 4097}, "trajectories"),
        ({"trajectories": [GIVEN, {**GIVEN, "reward": 1}]}, "trajectories"),
        ({"trajectories": [{"completion_token_ids": [1]}]}, "trajectories[0].prompt_token_ids"),
        ({"trajectories": [{"prompt_token_ids": [1]}]}, "trajectories[0].completion_token_ids"),
        ({"trajectories": [GIVEN, {**GIVEN, "prompt_token_ids": []}]}, "trajectories[1].prompt_token_ids"),
        ({"trajectories": [{**GIVEN, "prompt_token_ids": "hi"}]}, "trajectories[0].prompt_token_ids"),
        ({"trajectories": [{**GIVEN, "prompt_token_ids": [258]}]}, "trajectories[0].prompt_token_ids"),
        ({"trajectories": [{**GIVEN, "completion_token_ids": []}]}, "trajectories[0].completion_token_ids"),
        ({"trajectories": [{**GIVEN, "completion_token_ids": [-1]}]}, "trajectories[0].completion_token_ids"),
        ({"trajectories": [GIVEN, {**GIVEN, "completion_token_ids": [258]}]}, "trajectories[1].completion_token_ids"),
        ({"trajectories": [{**GIVEN, "reward": math.nan}]}, "trajectories[0].reward"),
        ({"trajectories": [{**GIVEN, "reward": 10**400}]}, "trajectories[0].reward"),
        ({"trajectories": [{**GIVEN, "reward": "1"}]}, "trajectories[0].reward"),
        ({"trajectories": [{**GIVEN, "reward": True}]}, "trajectories[0].reward"),
        ({"trajectories": [{**GIVEN, "sampling_logprobs": [-1]}]}, "trajectories[0].sampling_logprobs"),
        ({"trajectories": [{**GIVEN, "sampling_logprobs": [-1, 0.5]}]}, "trajectories[0].sampling_logprobs[1]"),
        ({"trajectories": [{**GIVEN, "sampling_logprobs": [-1, -math.inf]}]}, "trajectories[0].sampling_logprobs[1]"),
        ({"trajectories": [{**GIVEN, "temperature": 0}]}, "trajectories[0].temperature"),
        ({"trajectories": [{**GIVEN, "group_id": "x" * 161}]}, "trajectories[0].group_id"),
        ({"trajectories": [{**GIVEN, "rewards": 1}]}, "trajectories[0].rewards"),
        ({"update_inference": 1}, "update_inference"),
        ({"checkpoint_name": ""}, "checkpoint_name"),
        ({"checkpoint_name": "x" * 161}, "checkpoint_name"),
        ({"lora_adapter": 1}, "lora_adapter"),
        ({"trajectory": []}, "trajectory"),
    ],
    ids=lambda value: str(value)[-60:],
)
async def test_bad_updates_are_refused_by_name(client, training, fields, param):
    assert (await refused(client, UPDATE, **fields))["param"] == param
    assert not training.calls


async def test_a_trajectory_beyond_the_context_is_refused(client, training):
    fits = {"prompt_token_ids": [1] * 60, "completion_token_ids": [2] * 4}
    await post(client, UPDATE, trajectories=[fits])
    error = await refused(client, UPDATE, trajectories=[fits, {**fits, "prompt_token_ids": [1] * 61}])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "trajectories[1]")
    assert len(training.calls) == 1
