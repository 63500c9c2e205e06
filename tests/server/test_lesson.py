"""`/v1/training/lesson` over HTTP. How lessons teach is in `tests/extras/lessons/test_lessons.py`."""

from dataclasses import replace

import pytest
from server.asking import fault, refusal

from mlx_parallm.errors import ConflictError, ContextLengthError, InvalidRequestError, StorageError
from mlx_parallm.extras.lessons.cards import (
    LessonAnswer,
    LessonOutcome,
    LessonPoint,
    LessonPrompt,
    LessonRule,
    LessonSpec,
    RuleKind,
)

ROUTE = "/v1/training/lesson"
ASKED = {"prompts": ["Hello"], "reward": {"word": "please"}}
HELLO = ({"role": "user", "content": "Hello"},)


async def test_a_lesson_is_begun_as_asked(client, lessons):
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    sizes = {"max_tokens": 16, "updates": 12, "group_size": 4, "temperature": 1.0, "learning_rate": 1e-4}
    body = {"prompts": ["Hello", system], "reward": {"pattern": r"\?\Z"}, "lora_adapter": "polite", **sizes}
    answer = await client.post(ROUTE, json=body)
    assert answer.status_code == 200
    said = answer.json()["lesson"]
    assert (said["id"], said["state"], said["lora_adapter"], said["updates"]) == ("lesson-1", "drawing", "polite", 0)
    assert (said["reward"], said["most_updates"]) == ({"pattern": r"\?\Z"}, 12)
    assert [prompt["messages"] for prompt in said["prompts"]] == [[*HELLO], system]
    rule = LessonRule(RuleKind.PATTERN, r"\?\Z")
    assert lessons.asked == [LessonSpec((HELLO, tuple(system)), rule, "polite", 16, 12, 4, 1.0, 1e-4)]


async def test_little_needs_to_be_said(client, lessons):
    assert (await client.post(ROUTE, json=ASKED)).json()["lesson"]["most_updates"] is None
    (spec,) = lessons.asked
    assert (spec.prompts, spec.rule, spec.adapter) == ((HELLO,), LessonRule(RuleKind.WORD, "please"), None)


async def test_the_curve_and_the_answers_are_shown(client, lessons):
    assert (await client.get(ROUTE)).json() == {"obstacle": "", "lesson": None}
    await client.post(ROUTE, json=ASKED)
    lessons.last = replace(
        lessons.last,
        points=(LessonPoint(0, 0.25, 0.1, 0.5, 24, 1_800_000_000.0),),
        prompts=(LessonPrompt(HELLO, (LessonAnswer("No.", 0.0),), (LessonAnswer("Please.", 1.0),)),),
        advice="Wait.",
    )
    lesson = (await client.get(ROUTE)).json()["lesson"]
    at = "2027-01-15T08:00:00.000Z"
    assert lesson["points"] == [{"update": 0, "reward": 0.25, "low": 0.1, "high": 0.5, "answers": 24, "at": at}]
    (prompt,) = lesson["prompts"]
    assert prompt["before"] == [{"text": "No.", "reward": 0.0}]
    assert prompt["now"] == [{"text": "Please.", "reward": 1.0}]
    assert (lesson["outcome"], lesson["ended"], lesson["advice"]) == (None, None, "Wait.")


async def test_it_is_stopped(client, lessons):
    await client.post(ROUTE, json=ASKED)
    stopped = (await client.delete(ROUTE)).json()["lesson"]
    assert (stopped["state"], stopped["outcome"], stopped["ended"]) == ("ended", "stopped", "2027-01-15T08:01:00.000Z")
    assert (await client.get(ROUTE)).json()["lesson"]["outcome"] == LessonOutcome.STOPPED
    lessons.error = ConflictError("No lesson runs.")
    await refusal(client.delete(ROUTE), 409, message="No lesson runs.")


async def test_it_ends_with_the_training_of_its_adapter(client, lessons):
    for name in ("polite", "policy"):
        await client.post("/v1/training/start", json={"lora_adapter": name})
        await client.post(ROUTE, json={**ASKED, "lora_adapter": name})
        stopped = await client.post("/v1/training/stop", json={"lora_adapter": name})
        if name == "polite":
            assert (stopped.status_code, stopped.json()["state"]) == (200, "stopped")
            assert lessons.last.outcome == "stopped"
        else:
            assert stopped.status_code == 409
            assert lessons.last.is_running, "the default adapter stays in training"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": ["a"] * 17}, "prompts"),
        ({"prompts": ["a" * 4001]}, "prompts"),
        ({"prompts": [[]]}, "prompts"),
        ({"prompts": [[{"role": "user", "content": "a"}] * 17]}, "prompts"),
        ({"prompts": [[{"role": "tool", "content": "a"}]]}, "prompts"),
        ({"reward": {}}, "reward"),
        ({"reward": {"word": "a", "judge": "b"}}, "reward"),
        ({"reward": {"word": "  "}}, "reward.word"),
        ({"reward": {"judge": "a" * 501}}, "reward.judge"),
        ({"reward": None}, "reward"),
        ({"max_tokens": 513}, "max_tokens"),
        ({"updates": 0}, "updates"),
        ({"group_size": 1}, "group_size"),
        ({"temperature": 0}, "temperature"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": 1}, "learning_rate"),
        ({"lora_adapter": ""}, "lora_adapter"),
    ],
)
async def test_a_bad_body_names_its_field(client, lessons, changes, param):
    answer = await client.post(ROUTE, json=ASKED | changes)
    assert answer.status_code == 400
    assert fault(answer)["param"].startswith(param)
    assert not lessons.asked


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (ConflictError("A lesson for policy runs."), 409, None),
        (InvalidRequestError("it is no regular expression", "reward.pattern"), 400, "reward.pattern"),
        (ContextLengthError("too long", "prompts[0]"), 400, "prompts[0]"),
        (StorageError("the disk is full"), 507, None),
    ],
)
async def test_what_cannot_begin_is_told(client, lessons, error, status, param):
    lessons.error = error
    await refusal(client.post(ROUTE, json=ASKED), status, param=param)


@pytest.mark.parametrize("training", [None])
async def test_it_says_how_to_start_the_server(client):
    assert "--enable-rl-training" in (await client.get(ROUTE)).json()["obstacle"]
    answer = await client.post(ROUTE, json=ASKED)
    assert (answer.status_code, fault(answer)["code"]) == (409, "training_disabled")
    assert (await client.delete(ROUTE)).status_code == 409
