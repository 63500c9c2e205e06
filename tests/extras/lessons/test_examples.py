"""A lesson that imitates examples, without a model: what it says meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.config import Config
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import Event, FinishReason, GenerationRequest, RequestFinished, SequenceOutput
from mlx_parallm.extras.lessons.cards import LessonCard, LessonOutcome, LessonRule, LessonShowing, LessonSpec, RuleKind
from mlx_parallm.extras.lessons.examples import SAMPLES
from mlx_parallm.extras.lessons.service import Lesson
from mlx_parallm.rl.status import TrainingEvent, UpdateReport

pytestmark = pytest.mark.ci

PROMPTS = (({"role": "user", "content": "one"},), ({"role": "user", "content": "two"},))
SPEC = LessonSpec(PROMPTS, LessonRule(RuleKind.WORD, "banana"), None, 8, None, 8, 0.8, 1e-3)
EXAMPLES = 2 * 6
"""Six answers to each prompt have the word."""


class World:
    """`drawn` and `made` let the examples be drawn and one update of them be made. `imitates`: whether training knows
    that its answers are no plateau."""

    def __init__(self) -> None:
        self.drawn, self.made = asyncio.Event(), asyncio.Semaphore(0)
        self.updates, self.status = 0, "published"
        member = SimpleNamespace(trajectory=SimpleNamespace(text="no"), reward=0.0)
        buffer = SimpleNamespace(find=lambda group: SimpleNamespace(members=[member] * 8))
        trajectories = SimpleNamespace(buffer=buffer, samples=lambda adapter: nullcontext())
        self._plateau = SimpleNamespace(restart=lambda: None, rests=False)
        training = SimpleNamespace(plateau=self._plateau)
        loop = SimpleNamespace(training=training, pause_reason=None, live=BASE_ADAPTER)
        service: Any = SimpleNamespace(trajectories=trajectories, update=self._update, loop=lambda adapter: loop)
        tokenizer = SimpleNamespace(apply_chat_template=lambda messages: [1])
        served: Any = SimpleNamespace(generate=self._generate, adapters=None, tokenizer=tokenizer)
        checkpoint: Any = SimpleNamespace(name="checkpoint-0")
        settled = (lambda: "", lambda: False, lambda: None)
        self.lesson = Lesson(SPEC, "tone", Config(), served, service, checkpoint, *settled)

    async def _generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        await self.drawn.wait()
        for index in range(SAMPLES):
            text = "a banana" if index < EXAMPLES // 2 else "an apple"
            yield SequenceOutput(index, (1,), text, finish_reason=FinishReason.STOP)
        yield RequestFinished(1, SAMPLES, 0, 0, 0, 1)

    async def _update(self, adapter: str, batch: Any, signal: Any) -> UpdateReport:
        await self.made.acquire()
        self.updates += 1
        return UpdateReport(AdapterRef(adapter, self.updates), self.updates, self.status, metrics={"loss": 4.0})

    @property
    def imitates(self) -> bool:
        return bool(self._plateau.rests)

    async def rewarded_with_nothing(self) -> None:
        """As many answers as an update has, and those that were being drawn when these came."""
        for number in range(6):
            data = {"adapter": "tone", "group_id": f"{self.lesson.prefix}{number}-0", "complete": True}
            self.lesson.on_event(TrainingEvent("scored", 0.0, data, ""))
        await self.settle()

    async def settle(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    def card(self) -> LessonCard:
        return self.lesson.card()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.lesson.close()


async def test_it_says_how_far_it_is_and_does_not_advise_to_give_up(world: World) -> None:
    await world.rewarded_with_nothing()
    assert (world.card().state, world.card().advice, world.card().examples) == ("showing", "", 0)
    assert world.card().showing == LessonShowing()
    world.drawn.set()
    await world.settle()
    assert world.card().showing == LessonShowing(EXAMPLES, 10, 1, 4, None)
    assert world.card().examples == 0, "none was imitated yet"
    world.made.release()
    await world.settle()
    assert world.card().showing == LessonShowing(EXAMPLES, 12, 1, 4, 4.0)
    assert (world.card().examples, world.card().advice, world.imitates) == (10, "", True)
    for _ in range(7):
        world.made.release()
    await world.settle()
    assert (world.updates, world.card().showing, world.card().examples) == (8, None, EXAMPLES)
    assert (world.card().state, world.card().advice, world.imitates) == ("waiting", "", False)


async def test_one_that_ends_meanwhile_gives_no_advice_about_what_the_examples_were_to_change(world: World) -> None:
    await world.rewarded_with_nothing()
    world.lesson.progress.end(LessonOutcome.STOPPED, "it was stopped")
    await world.lesson.close()
    assert (world.card().state, world.card().advice, world.card().showing) == ("ended", "", None)


async def test_what_no_update_has_taken_was_not_imitated(world: World) -> None:
    world.status = "held"
    world.drawn.set()
    await world.rewarded_with_nothing()
    for _ in range(8):
        world.made.release()
    await world.settle()
    assert (world.updates, world.card().examples) == (8, 0)
    assert "No answer has earned a reward" in world.card().advice
