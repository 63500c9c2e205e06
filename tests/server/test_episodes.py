"""Groups and episodes over HTTP: what a request says of them, histories that come back, and rewards."""

import pytest
from server.asking import answered, fault, refusal

from mlx_parallm.errors import ConflictError, UnknownTrajectoryError

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x"},
}
FEEDBACK = "/v1/training/feedback"
EPISODE = {"collect_trajectory": True, "group_id": "g", "group_size": 2, "episode_id": "7", "turn": 0}
HEADERS = {"X-Group-Id": "g", "X-Group-Size": "2", "X-Episode-Id": "7", "X-Turn": "0"}


def named(request):
    spec = request.collection
    return spec.group_id, spec.group_size, spec.episode_id, spec.turn


@pytest.mark.parametrize("path", BODIES)
async def test_groups_and_episodes_are_named_in_the_body_or_in_headers(client, engine, training, path):
    for body, headers in ((EPISODE, {}), ({}, HEADERS)):
        response = await client.post(path, json=BODIES[path] | body, headers=headers)
        assert response.status_code == 200, response.text
    assert list(map(named, engine.requests)) == [("g", 2, "7", 0)] * 2
    assert [spec.group_id for spec, _ in training.checked] == ["g", "g"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"group_id": "g"}, "group_id"),
        ({"episode_id": "e"}, "episode_id"),
        ({"collect_trajectory": True, "group_size": 2}, "group_size"),
        ({"collect_trajectory": True, "turn": 1}, "turn"),
        ({"collect_trajectory": True, "episode_id": "e", "n": 2}, "n"),
        ({"collect_trajectory": True, "group_id": ""}, "group_id"),
        ({"collect_trajectory": True, "group_id": "g", "group_size": 0}, "group_size"),
        ({"collect_trajectory": True, "episode_id": "e", "turn": -1}, "turn"),
    ],
)
async def test_what_makes_no_sense_is_refused(client, fields, param):
    await refusal(client.post(CHAT, json=BODIES[CHAT] | fields), 400, param=param)


async def test_an_episode_has_one_prompt_a_turn(client):
    body = {"prompt": ["a", "b"], "collect_trajectory": True, "episode_id": "e"}
    assert fault(await client.post(COMPLETIONS, json=body))["param"] == "prompt"


@pytest.mark.parametrize(("header", "param"), [("X-Group-Size", "group_size"), ("X-Turn", "turn")])
async def test_a_header_that_is_no_number_is_refused_by_the_name_of_its_field(client, header, param):
    await refusal(client.post(CHAT, json=BODIES[CHAT], headers={**HEADERS, header: "two"}), 400, param=param)


# ---- histories -------------------------------------------------------------------------------------


async def chat(client, *texts, stream=False, episode="e", **fields):
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    body = {"messages": messages, "collect_trajectory": True, "episode_id": episode, "stream": stream, **fields}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text


def prompts(engine):
    return [bytes(request.prompts[0]).decode() for request in engine.requests]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_history_that_comes_back_continues_the_drawn_tokens(client, engine, stream):
    await chat(client, "one", stream=stream)
    await chat(client, "one", "Hi ä!", "two", stream=stream)
    first, second = engine.requests
    assert prompts(engine) == ["u:one\na:", "u:one\na:Hi ä!\nu:two\na:"]
    assert [request.collection.unmatched for request in engine.requests] == ["", ""]
    assert second.prompts[0][: len(first.prompts[0])] == first.prompts[0]


async def test_episodes_do_not_mix(client, engine):
    await chat(client, "one")
    await chat(client, "one", "Hi ä!", "two", episode="other")
    await chat(client, "one", "Hi ä!", "two", group_id="g")
    assert [request.collection.unmatched for request in engine.requests] == ["", "", ""]


async def test_a_turn_that_failed_or_lost_its_client_is_not_continued(client, engine):
    engine.fail_before, engine.error = 2, ConflictError("gone")
    response = await client.post(CHAT, json=BODIES[CHAT] | EPISODE)
    assert response.status_code == 409
    engine.fail_before = None
    await chat(client, "x", "Hi", "two", episode="7", group_id="g")
    assert engine.requests[-1].collection.unmatched == "", "it is the first turn"


# ---- rewards ---------------------------------------------------------------------------------------


async def test_rewards_of_answers_episodes_and_tokens(client, training):
    for body, call in (
        ({"trajectory_id": "traj-0", "score": 1}, ("feedback", "traj-0", 1.0, "")),
        ({"episode_id": "e", "score": 0.5}, ("reward_episode", "e", "", 0.5)),
        ({"episode_id": "e", "group_id": "g", "score": 0.5}, ("reward_episode", "e", "g", 0.5)),
        ({"trajectory_id": "traj-0", "token_rewards": [0.5, 1]}, ("reward_tokens", "traj-0", [0.5, 1.0])),
    ):
        answer = await answered(client, FEEDBACK, body)
        assert training.calls[-1] == call
        assert answer["score"] == pytest.approx(body.get("score", 1.5))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"score": 1}, "trajectory_id"),
        ({"trajectory_id": "t", "episode_id": "e", "score": 1}, "trajectory_id"),
        ({"trajectory_id": "t"}, "score"),
        ({"trajectory_id": "t", "score": 1, "token_rewards": [1]}, "score"),
        ({"trajectory_id": "t", "group_id": "g", "score": 1}, "group_id"),
        ({"episode_id": "e", "token_rewards": [1]}, "token_rewards"),
        ({"trajectory_id": "t", "token_rewards": []}, "token_rewards"),
    ],
)
async def test_feedback_that_names_nothing_or_two_things_is_refused(client, training, body, param):
    await refusal(client.post(FEEDBACK, json=body), 400, param=param)
    assert training.calls == []


async def test_a_group_is_closed(client, training):
    response = await client.post("/v1/training/groups/math%20%2F7/close")
    assert response.json() == {
        "group_id": "math /7",
        "lora_adapter": "policy",
        "members": 4,
        "rewarded": 3,
        "complete": True,
    }
    training.error = UnknownTrajectoryError("no such group", param="group_id")
    await refusal(client.post("/v1/training/groups/other/close"), 404, param="group_id")
