"""What rewards the answers of a lesson, what it notes of them, and when it ends."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.core.requests import Event, FinishReason, GenerationRequest, RequestFinished, SequenceOutput, WorkClass
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.extras.lessons.cards import (
    LessonAnswer,
    LessonCard,
    LessonOutcome,
    LessonPoint,
    LessonPrompt,
    LessonRule,
    LessonSpec,
    RuleKind,
)
from mlx_parallm.extras.lessons.examples import SAMPLES, examples_of, request_for
from mlx_parallm.extras.lessons.progress import LessonProgress
from mlx_parallm.extras.lessons.record import read_lesson, write_lesson
from mlx_parallm.extras.lessons.rules import answers_per_update, word_pattern


def spec(prompts: int = 3, group_size: int = 8, updates: int | None = None) -> LessonSpec:
    asked = tuple(({"role": "user", "content": f"prompt {number}"},) for number in range(prompts))
    return LessonSpec(asked, LessonRule(RuleKind.WORD, "please"), None, 48, updates, group_size, 0.8, 1e-3)


# ---- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "found", "not_found"),
    [
        ("please", ["Please!", "do it, PLEASE", "please"], ["pleased", "displease", ""]),
        ("thank you", ["Thank\nyou.", "so: thank  you"], ["thank your", "thankyou"]),
        ("c++", ["in C++.", "c++ is"], ["c", "c+"]),
        ("?", ["who?", "?"], ["who"]),
        ("ça", ["Ça va"], ["faça"]),
    ],
)
def test_a_word_is_found_as_a_whole(word: str, found: list[str], not_found: list[str]) -> None:
    pattern = re.compile(word_pattern(word))
    assert [text for text in found if not pattern.search(text)] == []
    assert [text for text in not_found if pattern.search(text)] == []


@pytest.mark.parametrize(("prompts", "size", "answers"), [(3, 8, 24), (1, 8, 24), (2, 8, 32), (16, 8, 128), (1, 5, 25)])
def test_an_update_has_enough_answers_and_as_many_to_each_prompt(prompts: int, size: int, answers: int) -> None:
    assert answers_per_update(spec(prompts, size)) == answers


# ---- progress ------------------------------------------------------------------------------------

MIXED, RIGHT, WRONG = (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)


def scored(progress: LessonProgress, *groups: tuple[float, ...], first: int = 0) -> None:
    for number, rewards in enumerate(groups, first):
        answers = [LessonAnswer(f"answer {number}.{place}", reward) for place, reward in enumerate(rewards)]
        progress.scored(number, answers)


def test_a_point_is_of_the_answers_between_two_updates() -> None:
    progress = LessonProgress(spec(2).prompts, 4, None)
    scored(progress, MIXED, WRONG)
    progress.updated()
    scored(progress, RIGHT, first=2)
    first, second = progress.points
    assert (first.update, first.reward, first.answers) == (0, 0.25, 4)
    assert (second.update, second.reward, second.answers) == (1, 1.0, 2), "of those so far"
    assert 0 <= first.low < 0.25 < first.high <= 1
    assert progress.outcome is None


def test_the_first_answers_to_each_prompt_stay_and_the_newest_change() -> None:
    progress = LessonProgress(spec(2).prompts, 4, None)
    scored(progress, MIXED, WRONG, RIGHT, RIGHT, MIXED)
    one, other = progress.prompts
    assert [answer.text for answer in one.before] == ["answer 0.0", "answer 0.1"]
    assert [answer.text for answer in one.now] == ["answer 4.0", "answer 4.1"]
    assert [answer.text for answer in other.now] == ["answer 3.0", "answer 3.1"]


@pytest.mark.parametrize(
    ("updates", "outcome", "advice"),
    [
        ([[MIXED, RIGHT], [RIGHT] * 3], LessonOutcome.LEARNT, ""),
        ([[RIGHT] * 4], LessonOutcome.LEARNT, "already"),
        ([[(0.5, 0.5)] * 6], LessonOutcome.NO_SIGNAL, "same reward"),
        ([[*[WRONG] * 5, MIXED, *[WRONG] * 5]], None, ""),
    ],
    ids=["learnt", "known already", "all alike", "one group with a signal"],
)
def test_when_it_ends(updates: list[list[tuple[float, ...]]], outcome: LessonOutcome | None, advice: str) -> None:
    progress = LessonProgress(spec(1).prompts, 4, None)
    for number, groups in enumerate(updates):
        if number:
            progress.updated()
        scored(progress, *groups)
    assert progress.outcome is outcome
    assert advice in progress.advice


def test_it_ends_after_its_updates() -> None:
    progress = LessonProgress(spec(1).prompts, 4, 1)
    progress.updated()
    assert progress.outcome is LessonOutcome.FINISHED


def test_without_a_reward_it_says_so_soon_and_ends_before_updates_are_skipped() -> None:
    progress = LessonProgress(spec(1).prompts, 4, None)
    scored(progress, WRONG)
    assert progress.advice == "", "too early to say"
    scored(progress, WRONG)
    assert "No answer has earned a reward" in progress.advice
    scored(progress, *[WRONG] * 3)
    assert progress.outcome is None
    scored(progress, WRONG)
    assert progress.outcome is LessonOutcome.NO_SIGNAL


# ---- examples ------------------------------------------------------------------------------------


class Letters:
    """A tokenizer whose tokens are characters, and whose template is the last message."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [ord(letter) for letter in messages[-1]["content"]]


async def test_what_the_model_says_when_asked_for_the_word_is_imitated_as_an_answer_to_the_bare_prompt() -> None:
    asked: list[GenerationRequest] = []

    async def generate(request: GenerationRequest) -> AsyncIterator[Event]:
        asked.append(request)
        yield SequenceOutput(0, (1,), "Oh ple")
        yield SequenceOutput(1, (9,), "no", finish_reason=FinishReason.STOP)
        yield SequenceOutput(0, (2, 3), "ase.", finish_reason=FinishReason.STOP)
        yield RequestFinished(1, 4, 0, 0, 0, 1)

    lesson = spec(prompts=2)
    examples = await examples_of(lesson, request_for(lesson, "lesson-1", 7, "acme"), generate, Letters())
    plain = [tuple(map(ord, f"prompt {number}")) for number in range(2)]
    assert examples == [GivenTrajectory(each, (1, 2, 3), owner="acme") for each in plain]
    texts = ["".join(map(chr, request.prompts[0])) for request in asked]
    assert all(text.startswith(f"prompt {number}\n") and '"please"' in text for number, text in enumerate(texts))
    drawn = {(request.n, request.work_class, request.collection, request.key) for request in asked}
    assert drawn == {(SAMPLES, WorkClass.TRAINING, None, "acme")}
    assert len({request.request_id for request in asked}) == 2


# ---- the file ------------------------------------------------------------------------------------


def card(outcome: LessonOutcome | None) -> LessonCard:
    points = (LessonPoint(0, 0.5, 0.25, 0.75, 24, 10.0),)
    asked, one, other = spec(2), (LessonAnswer("a", 0.0),), (LessonAnswer("é\ufffd", 1.0),)
    sizes = (asked.max_tokens, asked.group_size, asked.temperature, asked.learning_rate, 24, asked.updates)
    prompts = (LessonPrompt(asked.prompts[0], one, other), LessonPrompt(asked.prompts[1]))
    begun = ("lesson-1", "default", "default@3", "checkpoint-0", {"word": "please"})
    return LessonCard(*begun, *sizes, prompts, 5.0, "drawing", 3, points=points, outcome=outcome)


def test_an_ended_lesson_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_lesson(tmp_path) is None
    write_lesson(tmp_path, card(LessonOutcome.LEARNT))
    assert read_lesson(tmp_path) == card(LessonOutcome.LEARNT)


def test_a_lesson_whose_process_was_killed_is_interrupted(tmp_path: Path) -> None:
    write_lesson(tmp_path, card(None))
    found = read_lesson(tmp_path)
    assert found is not None
    assert (found.state, found.outcome, found.points) == ("ended", LessonOutcome.INTERRUPTED, card(None).points)
    assert found.ended is not None


def test_a_damaged_file_is_left_out_and_a_full_disk_is_survived(tmp_path: Path) -> None:
    (tmp_path / "lesson.json").write_text('{"lesson_id": 1}')
    assert read_lesson(tmp_path) is None
    write_lesson(tmp_path / "gone", card(None))
