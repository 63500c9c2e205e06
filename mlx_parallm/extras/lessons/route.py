"""`/v1/training/lesson`: prompts and a rule for the reward, from which the server teaches an adapter by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import Depends
from pydantic import Field, model_validator

from mlx_parallm.extras.lessons.cards import LessonCard, LessonRule, LessonSpec, RuleKind
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.bodies import MAX_TEMPERATURE
from mlx_parallm.server.api.fields import WireInput, WireOutput, refused
from mlx_parallm.server.body import json_body
from mlx_parallm.server.request import MAX_ADAPTER_NAME, adapter_named_by
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import DOES_NOT_TRAIN, ServicesDep

if TYPE_CHECKING:
    from mlx_parallm.extras.lessons.service import Lessons

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
    temperature: Annotated[float, Field(ge=0.1, le=MAX_TEMPERATURE)] = 0.8
    """Temperature at which they are sampled. A higher one tries more, and small models then write nonsense."""
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


class LessonStatus(WireOutput):
    """Whether lessons can be given, and the last one. All routes of lessons answer in this form."""

    obstacle: str
    """Why this server takes no lessons, and what to change; empty if it does."""
    lesson: LessonCard | None
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
    does. 409 if one runs already, or if the server samples rollouts of its own environment."""
    lessons: Lessons = services.require_extra("lessons")
    with adapter_named_by("lora_adapter", body.lora_adapter):
        return _status(lessons, await services.lifecycle.run_to_end(lessons.start(body.spec, services.key.reader)))


@router.delete("/v1/training/lesson", role=Role.TRAIN, audited=True)
async def stop_lesson(services: ServicesDep) -> LessonStatus:
    """Ends the lesson that runs. What it has taught stays."""
    lessons: Lessons = services.require_extra("lessons")
    return _status(lessons, await services.lifecycle.run_to_end(lessons.stop(services.key.reader)))


def _status(lessons: Lessons, card: LessonCard | None) -> LessonStatus:
    return LessonStatus(obstacle=lessons.obstacle(), lesson=card)
