"""Judges, against a small server that speaks OpenAI's chat API."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from rl.scoring_rig import LONG_S, group

from mlx_parallm.rl.scoring import judges
from mlx_parallm.rl.scoring.judges import Judge, grader, ranker
from mlx_parallm.rl.scoring.sample import ScorerError, ScorerInput
from mlx_parallm.rl.scoring.scorers import RewardSpec, read_reward
from mlx_parallm.rl.scoring.service import ScoringService

Answer = Callable[[dict[str, Any]], object]


class Model:
    """A server whose model replies with what `answer` makes of a request: text, JSON, or an HTTP status."""

    def __init__(self) -> None:
        self.answer: Answer = lambda body: {"score": 5}
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                model.asked.append({"path": self.path, **body})
                model.headers.append(dict(self.headers))
                reply = model.answer(body)
                status, text = (reply, "no") if isinstance(reply, int) else (200, reply)
                content = text if isinstance(text, str) else json.dumps(text)
                sent = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
                self.send_response(status)
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a proxy that is not there
    made = Model()
    yield made
    made.server.shutdown()
    made.server.server_close()


def samples(*texts: str, **metadata: object) -> list[ScorerInput]:
    prompt = [{"role": "user", "content": "Name a colour."}]
    return [ScorerInput(text, 3, 1, "stop", metadata, prompt) for text in texts]


def user_text(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


def fault(scorer, *texts: str) -> str:
    with pytest.raises(ScorerError) as caught:
        scorer(samples(*(texts or ("red",))))
    return str(caught.value)


def test_a_grader_grades_each_answer_by_the_instruction(model: Model) -> None:
    model.answer = lambda body: {"score": 10 if "<answer>\nred" in user_text(body) else 2.5}
    scores = grader(Judge(model.url, "judge-1", "Red is best.", "key"))(samples("red", "blue", "red", answer="red"))
    assert list(scores) == [1, 0.25, 1]
    asked = model.asked[0]
    assert (asked["path"], asked["model"], asked["temperature"]) == ("/v1/chat/completions", "judge-1", 0)
    assert asked["messages"][0]["content"].startswith("Red is best.")
    assert "user: Name a colour." in user_text(asked)
    assert "<reference_answer>\nred" in user_text(asked)
    schema = asked["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["score"] == {"type": "integer", "minimum": 0, "maximum": 10}
    assert schema["additionalProperties"] is False, "or servers refuse a strict schema"
    assert model.headers[0]["Authorization"] == "Bearer key"


def test_a_ranker_sees_the_whole_group_in_one_call(model: Model) -> None:
    model.answer = lambda body: {"scores": [0, 10, 5]}
    assert list(ranker(Judge(model.url))(samples("blue", "red", "green"))) == [0, 1, 0.5]
    (asked,) = model.asked
    places = [
        user_text(asked).index(f'<answer number="{number}">\n{text}') for number, text in ((1, "blue"), (2, "red"))
    ]
    assert places == sorted(places)
    wanted = asked["response_format"]["json_schema"]["schema"]["properties"]["scores"]
    assert (wanted["minItems"], wanted["maxItems"]) == (3, 3)
    assert asked["model"] == "base"
    assert "Authorization" not in model.headers[0]


@pytest.mark.parametrize("reply", [{"scores": [1.0]}, {"scores": 1}, {"score": 1}])
def test_a_ranking_of_another_number_of_answers_is_refused(model: Model, reply: object) -> None:
    model.answer = lambda body: reply
    assert "did not give 2 scores" in fault(ranker(Judge(model.url)), "red", "blue")


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"score": 11}, "the judge gave '11'; a score is a number from 0 to 10"),
        ({"score": "good"}, "the judge gave 'good'"),
        ({"score": float("nan")}, "the judge gave 'nan'"),
        ({}, "the judge gave 'None'"),
        ("It is good.", "did not reply with a JSON object but with 'It is good.'"),
        ([1], "did not reply with a JSON object but with '[1]'"),
        (401, "answered 401: "),
    ],
)
def test_a_reply_that_is_no_score_is_a_fault(model: Model, reply: object, message: str) -> None:
    model.answer = lambda body: reply
    assert message in fault(grader(Judge(model.url)))
    assert len(model.asked) == 1


def test_a_busy_server_is_asked_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(judges, "_PAUSES_S", (0.5, 1.0))
    monkeypatch.setattr(judges, "time", SimpleNamespace(sleep=pauses.append))
    model.answer = lambda body: 503 if len(model.asked) < 3 else {"score": 10}
    assert list(grader(Judge(model.url))(samples("red"))) == [1]
    model.answer = lambda body: 429
    assert "answered 429" in fault(grader(Judge(model.url)))
    assert len(model.asked) == 6
    assert pauses == [0.5, 1.0] * 2


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "_PAUSES_S", (0.01,))
    assert "the judge at http://127.0.0.1:9/v1 cannot be reached" in fault(grader(Judge("http://127.0.0.1:9/v1")))
    assert "set rl_training.judge.url" in fault(grader(Judge()))


async def test_judges_run_in_the_scoring_processes(model: Model) -> None:
    """The address of the very server is set when it is known, and a configured one stays."""
    model.answer = lambda body: {"score": 2}
    scoring = ScoringService(1, 32, LONG_S, RewardSpec(read_reward("0.5*judge + 0.5*exact")))
    scoring.judge_by(model.url, "key")
    scoring.judge_by("http://127.0.0.1:9/v1", "")
    try:
        a, b = await scoring.score(group("reward", "a", "bc", answer="a"))
    finally:
        await scoring.close()
    assert (a, b) == (pytest.approx(0.6), pytest.approx(0.1))
    assert model.headers[0]["Authorization"] == "Bearer key"
