"""`/v1/training/lesson`: prompts and a rule for the reward, from which the server teaches an adapter by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import Depends
from pydantic import Field, model_validator

from mlx_parallm.core.json_values import utc
from mlx_parallm.rl.lessons.cards import (
    LessonAnswer,
    LessonCard,
    LessonPoint,
    LessonRule,
    LessonShowing,
    LessonSpec,
    RuleKind,
)
from mlx_parallm.server.access.roles import Role
from mlx_parallm.server.api.fields import WireInput, WireOutput, refused
from mlx_parallm.server.http.body import json_body
from mlx_parallm.server.request import MAX_ADAPTER_NAME, adapter_named_by
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import DOES_NOT_TRAIN, ServicesDep

if TYPE_CHECKING:
    from mlx_parallm.app.lessons import Lessons

MAX_PROMPTS, MAX_MESSAGES, MAX_CHARACTERS = 16, 16, 4000
MAX_RULE = 500
"""Characters of a rule."""
MAX_TOKENS, MAX_UPDATES, MAX_GROUP = 512, 1000, 32


router = Router()


# -- what a lesson is ------------------------------------------------------------------------------


class LessonMessage(WireInput):
    """One message of a prompt."""

    role: Literal["system", "user", "assistant"]
    """The author of the message."""
    content: Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
    """Its text."""


PromptText = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
PromptMessages = Annotated[list[LessonMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
RuleText = Annotated[str, Field(min_length=1, max_length=MAX_RULE, pattern=r"\S")]


class LessonReward(WireInput):
    """The rule for the reward: one of these."""

    word: RuleText | None = None
    """A word or phrase: 1 if the answer has it, in upper or lower case and not as a part of a longer word."""
    pattern: RuleText | None = None
    r"""A regular expression: 1 if it is found in the answer (Python's `re.search`). `\A` and `\Z` are its ends."""
    judge: RuleText | None = None
    """A sentence that says what a good answer is. A language model (`rl_training.judge`) grades each answer by it,
    from 0 to 1."""

    @model_validator(mode="after")
    def _has_one(self) -> LessonReward:
        if len(self._given) != 1:
            raise refused("send one of word, pattern and judge")
        return self

    @property
    def _given(self) -> list[LessonRule]:
        return [LessonRule(kind, text) for kind in RuleKind if (text := getattr(self, kind.value)) is not None]

    @property
    def rule(self) -> LessonRule:
        return self._given[0]


class LessonBody(WireInput):
    """A lesson to begin."""

    prompts: Annotated[list[PromptText | PromptMessages], Field(min_length=1, max_length=MAX_PROMPTS)]
    """The prompts: each the text of a user's message, or the messages of a conversation that the answer continues."""
    reward: LessonReward
    """The rule for the reward."""
    lora_adapter: Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME)] | None = None
    """The adapter that learns, which may be a new name. By default, the default adapter."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 48
    """Largest number of tokens of an answer."""
    updates: Annotated[int, Field(ge=1, le=MAX_UPDATES)] | None = None
    """Updates after which the lesson ends. By default, it goes on until it is stopped, is learnt, or cannot be."""
    group_size: Annotated[int, Field(ge=2, le=MAX_GROUP)] = 8
    """Answers to each prompt that are compared with each other."""
    temperature: Annotated[float, Field(ge=0.1, le=2)] = 0.8
    """Temperature at which they are drawn. A higher one tries more, and small models then write nonsense."""
    learning_rate: Annotated[float, Field(gt=0, le=0.1)] = 1e-3
    """Learning rate of the lesson's updates."""

    @property
    def spec(self) -> LessonSpec:
        return LessonSpec(
            tuple(map(_messages, self.prompts)),
            self.reward.rule,
            self.lora_adapter,
            self.max_tokens,
            self.updates,
            self.group_size,
            self.temperature,
            self.learning_rate,
        )


def _messages(prompt: str | list[LessonMessage]) -> tuple[dict[str, str], ...]:
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    return tuple({"role": message.role, "content": message.content} for message in prompt)


# -- what it has taught ----------------------------------------------------------------------------


class LessonPromptObject(WireOutput):
    """One prompt with answers to it, drawn at the temperature of the lesson."""

    messages: list[dict[str, str]]
    """The prompt."""
    before: tuple[LessonAnswer, ...]
    """The first answers that were drawn; empty if there are none yet."""
    now: tuple[LessonAnswer, ...]
    """The newest answers."""


class LessonPointObject(WireOutput):
    """One point of the curve: the answers between two updates."""

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
    at: str
    """Time of the last one in ISO-8601, UTC."""


class LessonObject(WireOutput):
    """A lesson that runs, or the last one."""

    id: str
    """Its name."""
    state: Literal["drawing", "waiting", "showing", "paused", "failed", "ended"]
    """`drawing`; `waiting`: an update has enough answers; `showing`: examples are imitated; `paused`, as training or
    the engine is; `failed`: it is about to end; `ended`."""
    outcome: Literal["learnt", "finished", "stopped", "no_signal", "failed", "interrupted"] | None
    """Why it has ended; null while it runs. `learnt`: nearly all answers earn the reward. `finished`: its updates are
    made. `no_signal`: the answers to each prompt were rewarded alike. `interrupted`: the server has ended."""
    reason: str
    """The same in words, or why it is paused; empty if there is nothing to say."""
    advice: str
    """What to change; empty if there is nothing, and while examples are imitated."""
    showing: LessonShowing | None
    """The examples that are imitated now; null unless `state` is `showing`."""
    lora_adapter: str
    """The adapter that learns."""
    live_lora: str | None
    """Its version that was live last; null before the first one."""
    checkpoint: str
    """The checkpoint of the adapter as it was before. A rollback to it undoes the lesson."""
    reward: dict[str, str]
    """The rule: `word`, `pattern` or `judge`."""
    max_tokens: int
    """Largest number of tokens of an answer."""
    group_size: int
    """Answers to each prompt that are compared with each other."""
    temperature: float
    """Temperature at which they are drawn."""
    learning_rate: float
    """Learning rate of its updates."""
    answers_per_update: int
    """Answers that make an update, if those to each prompt differ in their rewards."""
    updates: int
    """Updates that were made."""
    examples: int
    """Answers that were imitated until now, because hardly any had earned a reward: those of the base model when it is
    asked for the word."""
    most_updates: int | None
    """Updates after which it ends; null: it goes on."""
    points: list[LessonPointObject]
    """The curve, oldest first, at most the last 1000 points and one of the answers since the last update."""
    prompts: list[LessonPromptObject]
    """The prompts, with answers before and now."""
    started: str
    """Time in ISO-8601, UTC."""
    ended: str | None
    """Time in ISO-8601, UTC; null while it runs."""


class LessonStatus(WireOutput):
    """Whether lessons can be given, and the last one. All routes of lessons answer in this form."""

    obstacle: str
    """Why this server takes no lessons, and what to change; empty if it does."""
    lesson: LessonObject | None
    """The lesson that runs, or else the last one of the run; null if there was none."""


# -- routes ----------------------------------------------------------------------------------------


@router.get("/v1/training/lesson", role=Role.TRAIN)
async def get_lesson(services: ServicesDep) -> LessonStatus:
    """The lesson that runs, or the last one. A server that does not train answers too, and says what to change."""
    lessons: Lessons | None = services.extra("lessons")
    if lessons is None:
        return LessonStatus(obstacle=DOES_NOT_TRAIN, lesson=None)
    return _status(lessons, lessons.card(services.key.reader))


@router.post(
    "/v1/training/lesson",
    role=Role.TRAIN,
    audited=True,
    examples={
        "a word": {"prompts": ["How do I ask for a spoon?"], "reward": {"word": "please"}},
        "a question": {"prompts": ["My dog is called Max."], "reward": {"pattern": "\\?\\s*\\Z"}, "updates": 20},
    },
)
async def start_lesson(
    body: Annotated[LessonBody, Depends(json_body(LessonBody))], services: ServicesDep
) -> LessonStatus:
    """Begins a lesson: the server answers the prompts by itself, beside requests, rewards the answers by the rule, and
    updates the adapter. Each update goes live at once. The lesson goes on if the client leaves, and pauses as training
    does. 409 if one runs already, or if the server draws rollouts of its own environment."""
    lessons: Lessons = services.require_extra("lessons")
    with adapter_named_by("lora_adapter", body.lora_adapter):
        return _status(lessons, await services.lifecycle.run_to_end(lessons.start(body.spec, services.key.reader)))


@router.delete("/v1/training/lesson", role=Role.TRAIN, audited=True)
async def stop_lesson(services: ServicesDep) -> LessonStatus:
    """Ends the lesson that runs. What it has taught stays."""
    lessons: Lessons = services.require_extra("lessons")
    return _status(lessons, await services.lifecycle.run_to_end(lessons.stop(services.key.reader)))


def _status(lessons: Lessons, card: LessonCard | None) -> LessonStatus:
    return LessonStatus(obstacle=lessons.obstacle(), lesson=None if card is None else lesson_object(card))


def lesson_object(card: LessonCard) -> LessonObject:
    spec = card.spec
    prompts = [
        LessonPromptObject(
            messages=[dict(message) for message in messages],
            before=samples.before,
            now=samples.now,
        )
        for messages, samples in zip(spec.prompts, card.samples, strict=True)
    ]
    return LessonObject.model_validate(
        {
            "id": card.lesson_id,
            "state": card.state,
            "outcome": card.outcome,
            "reason": card.reason,
            "advice": card.advice,
            "showing": card.showing,
            "lora_adapter": card.adapter,
            "live_lora": card.live or None,
            "checkpoint": card.checkpoint,
            "reward": {spec.rule.kind.value: spec.rule.text},
            "max_tokens": spec.max_tokens,
            "group_size": spec.group_size,
            "temperature": spec.temperature,
            "learning_rate": spec.learning_rate,
            "answers_per_update": card.per_update,
            "updates": card.updates,
            "examples": card.examples,
            "most_updates": spec.updates,
            "points": list(map(_point, card.points)),
            "prompts": prompts,
            "started": utc(card.started),
            "ended": None if card.ended is None else utc(card.ended),
        }
    )


def _point(point: LessonPoint) -> LessonPointObject:
    return LessonPointObject(
        update=point.update,
        reward=point.reward,
        low=point.low,
        high=point.high,
        answers=point.answers,
        at=utc(point.at),
    )
