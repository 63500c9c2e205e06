"""Lessons: prompts and a rule for the reward that a client gives while the server runs, and what they have taught."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from mlx_parallm.core.json_values import ANSWER


class RuleKind(StrEnum):
    """What rewards the answers of a lesson.

    WORD: 1 if the answer has the word or phrase, in upper or lower case. PATTERN: 1 if the regular expression is found
    in the answer. JUDGE: a language model grades the answer by a sentence, from 0 to 1.
    """

    WORD = "word"
    PATTERN = "pattern"
    JUDGE = "judge"


@dataclass(frozen=True, slots=True)
class LessonRule:
    """The rule for the reward. `text`: the word, the regular expression, or the sentence that the judge gets."""

    kind: RuleKind
    text: str


@dataclass(frozen=True, slots=True)
class LessonSpec:
    """What a lesson is.

    Attributes:
        prompts: conversations to be answered; dicts with `role` and `content`.
        adapter: the adapter that learns; None: the default one.
        max_tokens: of an answer.
        updates: updates after which the lesson ends; None: it goes on until it is stopped.
        group_size: answers to each prompt that are compared with each other.
        temperature: at which they are drawn.
        learning_rate: of its updates, in place of the configured one.
    """

    prompts: tuple[tuple[Mapping[str, str], ...], ...]
    rule: LessonRule
    adapter: str | None
    max_tokens: int
    updates: int | None
    group_size: int
    temperature: float
    learning_rate: float


class LessonOutcome(StrEnum):
    """Why a lesson has ended.

    LEARNT: nearly all of its last answers earned the whole reward. FINISHED: its updates are made. STOPPED: a client
    has stopped it. NO_SIGNAL: the answers to each prompt were rewarded alike, so there was nothing to learn. FAILED:
    answers could not be drawn or scored. INTERRUPTED: the process has ended.
    """

    LEARNT = "learnt"
    FINISHED = "finished"
    STOPPED = "stopped"
    NO_SIGNAL = "no_signal"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class LessonAnswer:
    """One answer."""

    text: str
    """Its text."""
    reward: float
    """Its reward, 0 to 1."""


@dataclass(frozen=True, slots=True)
class LessonSamples:
    """Answers to one prompt: the first group that was drawn, and the newest one."""

    before: tuple[LessonAnswer, ...] = ()
    now: tuple[LessonAnswer, ...] = ()


@dataclass(frozen=True, slots=True)
class LessonPoint:
    """The rewards between one update and the next: a point of the curve.

    Attributes:
        update: updates of the lesson that were made before these answers were scored.
        reward: the mean of the `answers`.
        low, high: its 95 % confidence interval.
        at: Unix time in seconds of the last of them.
    """

    update: int
    reward: float
    low: float
    high: float
    answers: int
    at: float


@dataclass(frozen=True, slots=True)
class LessonShowing:
    """The examples that are imitated now. All of them are imitated several times."""

    __pydantic_config__ = ANSWER

    examples: int = 0
    """Their number; 0 while they are being sampled."""
    number: int = 0
    """The last of those that the update in progress imitates, counted from 1."""
    time: int = 1
    """Which time it is, counted from 1."""
    times: int = 1
    """How often all of them are imitated."""
    loss: float | None = None
    """Loss of the update before; null at the first one."""


@dataclass(frozen=True, slots=True)
class LessonCard:
    """A lesson as it is now.

    Attributes:
        lesson_id: its name.
        state: drawing, waiting, showing (examples are imitated), paused, failed or ended.
        adapter: the name of the adapter that learns.
        live: its live version when it was last looked at; empty before the first one.
        per_update: answers that make an update.
        checkpoint: of the adapter as it was before the lesson; a rollback to it undoes the lesson.
        updates: those that were made.
        examples: answers that were imitated because hardly any answer had earned a reward, up to now.
        points: the curve, oldest first.
        samples: one for each prompt, in order.
        outcome: why it has ended; None: it has not.
        reason: the same, or why it is paused, in words.
        advice: what to change, in words; empty if there is nothing.
        started, ended: Unix time in seconds.
        showing: what is imitated now; None: nothing.
    """

    lesson_id: str
    spec: LessonSpec
    state: str
    adapter: str
    live: str
    per_update: int
    checkpoint: str
    updates: int
    examples: int
    points: tuple[LessonPoint, ...]
    samples: tuple[LessonSamples, ...]
    outcome: LessonOutcome | None
    reason: str
    advice: str
    started: float
    ended: float | None = None
    showing: LessonShowing | None = None

    @property
    def is_running(self) -> bool:
        return self.outcome is None
