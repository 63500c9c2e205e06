"""`POST /v1/training/preference` and `GET /v1/training/report`: what training is given, and what is refused."""

import pytest
from server.asking import answered, refusal, refused

from mlx_parallm.extras.people.service import Edit, FoundTrajectory

PREFERENCE, REPORT = "/v1/training/preference", "/v1/training/report"
END = 257


@pytest.fixture
def drawn(training):
    """Two answers to one prompt, one to another prompt, and one of another adapter."""
    training.found = {
        "a": FoundTrajectory("policy", (1, 2), (65, END), "A"),
        "b": FoundTrajectory("policy", (1, 2), (66, END), "B"),
        "other": FoundTrajectory("policy", (3,), (66, END), "B"),
        "foreign": FoundTrajectory("math", (1, 2), (67, END), "C"),
    }


async def sent(client, **body):
    return await answered(client, PREFERENCE, body)


async def test_an_edited_answer_is_a_preference_and_its_text_is_ended(client, training, drawn):
    told = await sent(client, chosen="xy", rejected_id="a", user="ann")
    assert told == {
        **{"status": "success", "edit_id": "edit-0", "signal": "preferences", "lora_adapter": "policy"},
        **{"is_new": True, "waiting": 1, "wanted": 16},
    }
    edit = Edit("policy", (1, 2), (120, 121, END), (65, END), "xy", "A", user="ann", about="a", owner="anyone")
    assert training.edits == [edit]


async def test_two_drawn_answers_are_compared_as_they_were_drawn(client, training, drawn):
    await sent(client, chosen_id="b", rejected_id="a")
    (edit,) = training.edits
    assert (edit.prompt_ids, edit.chosen_ids, edit.rejected_ids) == ((1, 2), (66, END), (65, END))


@pytest.mark.parametrize("field", ["correction", "chosen"])
async def test_a_correction_is_the_same_by_either_name(client, training, drawn, field):
    told = await sent(client, **{"trajectory_id": "a", field: "x"})
    assert told["signal"] == "corrections"
    (edit,) = training.edits
    assert (edit.chosen_ids, edit.rejected_ids, edit.about) == ((120, END), (), "a")


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ({"prompt": "hi"}, tuple(b"hi")),
        ({"prompt_token_ids": [5, 6]}, (5, 6)),
        ({"messages": [{"role": "user", "content": "hi"}]}, tuple(b"u:hi\na:")),
    ],
)
async def test_a_prompt_may_be_given_in_every_form(client, training, prompt, ids):
    await sent(client, **prompt, chosen="x", rejected="y")
    assert training.edits[0].prompt_ids == ids


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"trajectory_id": "a"}, "chosen"),
        ({"trajectory_id": "a", "rejected": "y"}, "chosen"),
        ({"chosen": "x", "rejected": "y"}, "trajectory_id"),
        ({"trajectory_id": "a", "prompt": "hi", "chosen": "x"}, "prompt"),
        ({"trajectory_id": "a", "chosen": "x", "correction": "x"}, "correction"),
        ({"trajectory_id": "a", "correction": "x", "rejected": "y"}, "correction"),
        ({"trajectory_id": "a", "chosen": "x", "rejected": "y", "rejected_id": "b"}, "rejected_id"),
        ({"trajectory_id": "a", "chosen": ""}, "chosen"),
        ({"trajectory_id": "a", "chosen": "x", "rejected": "x"}, "rejected"),
        ({"trajectory_id": "other", "chosen": "x", "rejected_id": "a"}, "rejected_id"),
        ({"chosen_id": "other", "rejected_id": "a"}, "rejected_id"),
        ({"chosen_id": "a", "rejected_id": "a"}, "rejected"),
        ({"prompt_token_ids": [10**6], "chosen": "x"}, "prompt_token_ids"),
        ({"trajectory_id": "a", "correction": "x" * 10**6}, "correction"),
        ({"trajectory_id": "a", "correction": "x", "user": "u" * 161}, "user"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_makes_no_edit_is_refused_by_name(client, training, drawn, body, param):
    error = await refused(client, PREFERENCE, **body)
    assert error["param"] == param or "context" in error["message"]
    assert not training.edits


@pytest.mark.parametrize("field", ["trajectory_id", "chosen_id", "rejected_id"])
async def test_an_unknown_trajectory_is_refused_by_name(client, training, drawn, field):
    other = {"trajectory_id": {"chosen": "x"}, "chosen_id": {"rejected_id": "a"}, "rejected_id": {"chosen": "x"}}
    error = await refused(client, PREFERENCE, 404, **{field: "nope", **other[field]})
    assert (error["code"], error["param"]) == ("trajectory_not_found", field)
    assert "nope" in error["message"]
    assert not training.edits


async def test_an_answer_of_another_adapter_is_refused_by_name(client, training, drawn):
    error = await refused(client, PREFERENCE, 409, chosen="x", rejected_id="foreign", lora_adapter="policy")
    assert (error["code"], error["param"]) == ("conflict", "rejected_id")
    assert "'math'" in error["message"]
    assert "'policy'" in error["message"]
    error = await refused(client, PREFERENCE, 409, chosen_id="a", rejected_id="foreign")
    assert error["param"] == "rejected_id"
    error = await refused(client, PREFERENCE, 404, prompt="x", correction="y", lora_adapter="nobody")
    assert (error["code"], error["param"]) == ("model_not_found", "lora_adapter")
    assert not training.edits


async def test_the_report_has_every_source(client):
    response = await client.get(REPORT)
    assert response.json() == {
        "lora_adapter": "policy",
        "opinions": 4,
        "people": 2,
        "sources": [
            {
                **{"source": "feedback", "arrived": 3, "waiting": 1, "trained": 1, "dropped": {"stale": 1}},
                **{"updates": 1, "gradient_share": 1.0, "reward_change": 0.25, "evaluation_change": None},
            }
        ],
        "keys": [
            {"whose": "key", "key": "ann", "steps": 0.5, "share": 0.5},
            {"whose": "key", "key": "anyone", "steps": 0.25, "share": 0.25},
            {"whose": "server", "key": None, "steps": 0.25, "share": 0.25},
        ],
    }
    assert (await client.get(REPORT, params={"lora_adapter": "nobody"})).status_code == 404


async def test_an_update_may_name_what_it_learns_from(client, training):
    assert (await client.post("/v1/training/update", json={"signal": "corrections"})).status_code == 200
    assert training.calls[-1][-1] == "corrections"
    given = {"prompt_token_ids": [1], "completion_token_ids": [2], "reward": 1}
    await refusal(
        client.post("/v1/training/update", json={"signal": "corrections", "trajectories": [given]}), 400, param="signal"
    )


async def test_control_tokens_in_a_text_are_refused(client, training, drawn, monkeypatch):
    tokenizer = client.app.state.services.models.first.tokenizer
    encode = type(tokenizer).encode
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text, *rest: [*encode(self, text, *rest), 256])
    error = await refused(client, PREFERENCE, trajectory_id="a", correction="x")
    assert "control token '<bos>'" in error["message"]
    assert not training.edits
