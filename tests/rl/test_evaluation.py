"""The held-out prompts of the gate: what each new version is asked, and what is made of its answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rl.fakes import FakeEngine, FakeScorers

from mlx_parallm.core import (
    AdapterRef,
    CollectionSpec,
    FinishReason,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SequenceOutput,
    WorkClass,
)
from mlx_parallm.errors import ConfigError, InvalidRequestError, StepFailedError
from mlx_parallm.rl.gate import EvalPrompt, Evaluation, read_prompts
from mlx_parallm.rl.scoring.pool import ScoringError

NEW = AdapterRef("math", 7)


def check(collection: CollectionSpec) -> None:
    if collection.scorer == "unknown":
        raise InvalidRequestError("unknown scorer", param="scoring_function")


PROMPTS = tuple(EvalPrompt((at,), CollectionSpec("exact", {"answer": str(at)})) for at in range(4))


class Engine(FakeEngine):
    """The answer to a prompt is its first token's number."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__([])
        self.requests: list[GenerationRequest] = []
        self.error = error

    async def generate(self, request: GenerationRequest):
        self.requests.append(request)
        if self.error:
            yield RequestFailed(self.error)
            return
        text = str(request.prompts[0][0])
        yield SequenceOutput(0, (5,), text, finish_reason=FinishReason.STOP, sampling_logprobs=(-0.5,))
        yield RequestFinished(1, 1, 0, 0, 0, 1)


def rewarding(*right: str) -> FakeScorers:
    return FakeScorers(lambda trajectory: float(trajectory.text in right))


@pytest.mark.parametrize(("floor", "passes"), [(0.4, True), (0.5, True), (0.51, False)])
async def test_the_mean_reward_is_held_against_the_floor(floor: float, passes: bool) -> None:
    assert await Evaluation(Engine(), rewarding("0", "3"), PROMPTS, floor, 9)(NEW) is passes


async def test_every_version_answers_the_same_with_the_same_seeds() -> None:
    engine = Engine()
    evaluation = Evaluation(engine, rewarding("1"), PROMPTS, 0.0, 9)
    await evaluation(NEW)
    await evaluation(AdapterRef("math", 8))
    first, second = engine.requests[:4], engine.requests[4:]
    assert [request.sampling for request in first] == [request.sampling for request in second]
    assert len({request.sampling.seed for request in first}) == 4
    assert {request.sampling.temperature for request in first} == {1.0}
    assert {request.stopping.max_tokens for request in first} == {9}
    assert [request.adapter for request in engine.requests] == [NEW] * 4 + [AdapterRef("math", 8)] * 4
    assert {request.work_class for request in first} == {WorkClass.TRAINING}
    assert len({request.request_id for request in engine.requests}) == 8


async def test_an_answer_or_a_reward_that_cannot_be_had_is_raised() -> None:
    with pytest.raises(StepFailedError):
        await Evaluation(Engine(StepFailedError("gone")), rewarding(), PROMPTS, 0.0, 9)(NEW)
    with pytest.raises(ScoringError):
        await Evaluation(Engine(), FakeScorers(None), PROMPTS, 0.0, 9)(NEW)


# ---- the file -----------------------------------------------------------------------------------


class Tokenizer:
    def apply_chat_template(self, messages):
        return [100, *map(ord, messages[0]["content"])]

    def encode(self, text):
        return list(map(ord, text))


def read(file: Path, *lines: object):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text(text, "utf-8")
    return read_prompts(file, Tokenizer(), check)


def test_a_line_is_a_request_body(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "scoring_function": "exact", "metadata": {"answer": "4"}}
    got = read(tmp_path / "eval.jsonl", chat, "", {"prompt": "bc", "scoring_function": "length"})
    assert got == (
        EvalPrompt((100, 97), CollectionSpec("exact", {"answer": "4"})),
        EvalPrompt((98, 99), CollectionSpec("length", {})),
    )


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        {"prompt": "a"},
        {"scoring_function": "exact"},
        {"prompt": "a", "scoring_function": "unknown"},
        {"messages": 3, "scoring_function": "exact"},
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: object) -> None:
    good = {"prompt": "a", "scoring_function": "exact"}
    with pytest.raises(ConfigError, match=r"line 2 of eval\.jsonl.*scoring_function"):
        read(tmp_path / "eval.jsonl", good, line)


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path / "eval.jsonl", '{"prompt": "a\u2028b", "scoring_function": "exact"}')
    assert prompt == EvalPrompt((97, 0x2028, 98), CollectionSpec("exact", {}))


def test_a_file_that_holds_nothing_or_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompt"):
        read(tmp_path / "eval.jsonl", "", "")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "missing.jsonl", Tokenizer(), check)
