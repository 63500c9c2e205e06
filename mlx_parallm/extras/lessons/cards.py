"""Lessons: prompts and a rule for the reward that a client gives while the server runs, and what they have taught."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from mlx_parallm.core.json_values import ANSWER, UnixTime


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
        temperature: at which they are sampled.
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
    answers could not be sampled or scored. INTERRUPTED: the process has ended.
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

    __pydantic_config__ = ANSWER

    text: str
    """Its text."""
    reward: float
    """Its reward, 0 to 1."""


@dataclass(frozen=True, slots=True)
class LessonPrompt:
    """One prompt with answers to it, sampled at the temperature of the lesson."""

    __pydantic_config__ = ANSWER

    messages: tuple[Mapping[str, str], ...]
    """The prompt."""
    before: tuple[LessonAnswer, ...] = ()
    """The first answers that were sampled; empty if there are none yet."""
    now: tuple[LessonAnswer, ...] = ()
    """The newest answers."""


@dataclass(frozen=True, slots=True)
class LessonPoint:
    """One point of the curve: the answers between two updates."""

    __pydantic_config__ = ANSWER

    update: int
    """Updates of the lesson that were made before."""
    reward: float
    """Mean reward of the answers."""
    low: float
    """Lower bound of its 95 % confidence interval."""
    high: float
    """Upper bound of it."""
    answers: int
    """Number of answers."""
    at: UnixTime
    """Time of the last one in ISO-8601, UTC."""


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


LessonState = Literal["drawing", "waiting", "showing", "paused", "failed", "ended"]


@dataclass(frozen=True, slots=True)
class LessonCard:
    """A lesson that runs, or the last one."""

    __pydantic_config__ = ANSWER

    id: str
    """Its name."""
    adapter: str
    """The adapter that learns."""
    live_lora: str | None
    """Its version that was live last; null before the first one."""
    checkpoint: str
    """The checkpoint of the adapter as it was before. A rollback to it undoes the lesson."""
    reward: Mapping[str, str]
    """The rule: `word`, `pattern` or `judge`."""
    max_tokens: int
    """Largest number of tokens of an answer."""
    group_size: int
    """Answers to each prompt that are compared with each other."""
    temperature: float
    """Temperature at which they are sampled."""
    learning_rate: float
    """Learning rate of its updates."""
    answers_per_update: int
    """Answers that make an update, if those to each prompt differ in their rewards."""
    most_updates: int | None
    """Updates after which it ends; null: it goes on."""
    prompts: tuple[LessonPrompt, ...]
    """The prompts, with answers before and now."""
    started: UnixTime
    """Time in ISO-8601, UTC."""
    state: LessonState
    """`drawing`; `waiting`: an update has enough answers; `showing`: examples are imitated; `paused`, as training or
    the engine is; `failed`: it is about to end; `ended`."""
    updates: int = 0
    """Updates that were made."""
    examples: int = 0
    """Answers that were imitated until now, because hardly any had earned a reward: those of the base model when it is
    asked for the word."""
    points: tuple[LessonPoint, ...] = ()
    """The curve, oldest first, at most the last 1000 points and one of the answers since the last update."""
    showing: LessonShowing | None = None
    """The examples that are imitated now; null unless `state` is `showing`."""
    outcome: LessonOutcome | None = None
    """Why it has ended; null while it runs. `learnt`: nearly all answers earn the reward. `finished`: its updates are
    made. `no_signal`: the answers to each prompt were rewarded alike. `interrupted`: the server has ended."""
    reason: str = ""
    """The same in words, or why it is paused; empty if there is nothing to say."""
    advice: str = ""
    """What to change; empty if there is nothing, and while examples are imitated."""
    ended: UnixTime | None = None
    """Time in ISO-8601, UTC; null while it runs."""

    @property
    def is_running(self) -> bool:
        return self.outcome is None
