"""Lessons of several API keys, without a model: what waits for the lock looks again at whose lesson runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from server.fake_control import LESSON, FakeLessons

from mlx_parallm.core.readers import Reader
from mlx_parallm.errors import ConflictError, UnknownModelError
from mlx_parallm.extras.lessons import service as module
from mlx_parallm.extras.lessons.cards import LessonOutcome
from mlx_parallm.extras.lessons.record import write_lesson
from mlx_parallm.extras.lessons.service import Lessons
from mlx_parallm.rl.parts import Changes, TrainingHooks

ACME = Reader("acme", sees=lambda name: name.startswith("acme"))
BOSS = Reader("boss", reads_all=True)
OF_ACME = replace(LESSON, adapter="acme-1")


class RunningLesson:
    """A lesson that samples nothing."""

    prefix = "lesson-1"

    def __init__(self, spec, adapter, *others):
        self.adapter, self._spec = adapter, spec
        self.progress = SimpleNamespace(end=lambda outcome, reason: None, outcome=None)

    def start(self):
        pass

    def card(self):
        return FakeLessons()._begun(replace(self._spec, adapter=self.adapter))

    async def close(self):
        pass


@pytest.fixture
def world(tmp_path, monkeypatch):
    """`lessons`, of which acme has had one; `saving`: beginning a lesson waits for it once `begun` is set."""
    monkeypatch.setattr(module, "Lesson", RunningLesson)
    monkeypatch.setattr(Lessons, "_check_prompts", lambda self, spec: None)
    begun, saving = asyncio.Event(), asyncio.Event()

    async def begin_lesson(pace, tag):
        begun.set()
        await saving.wait()

    async def done(*arguments):
        pass

    service = SimpleNamespace(
        default_adapter="policy",
        parts=SimpleNamespace(scorers=SimpleNamespace(check=done)),
        hooks=TrainingHooks(),
        add_sink=lambda sink: None,
        emit=lambda kind, **data: None,
        start=done,
        check_changeable=lambda adapter: None,
        changes=Changes(),
        loop=lambda adapter: SimpleNamespace(begin_lesson=begin_lesson, end_lesson=done),
        trajectories=SimpleNamespace(buffer=SimpleNamespace(drop_own=lambda *arguments: None)),
    )
    write_lesson(tmp_path, replace(FakeLessons()._begun(OF_ACME), outcome=LessonOutcome.STOPPED))
    served = SimpleNamespace(run=SimpleNamespace(path=tmp_path))
    config = SimpleNamespace(rl_training=SimpleNamespace(trajectory_buffer_size=10**6, own_environment=None))
    lessons = Lessons(config, served, service)  # type: ignore[arg-type]
    return SimpleNamespace(lessons=lessons, begun=begun, saving=saving)


async def test_a_lesson_that_begins_meanwhile_is_not_stopped_by_a_key_that_does_not_see_it(world):
    assert world.lessons.card(ACME).adapter == "acme-1"
    starting = asyncio.create_task(world.lessons.start(LESSON, BOSS))
    await world.begun.wait()
    stopping = asyncio.create_task(world.lessons.stop(ACME))
    await asyncio.sleep(0)
    world.saving.set()
    assert (await starting).adapter == "policy"
    with pytest.raises(ConflictError, match="No lesson runs"):
        await stopping
    assert world.lessons.card(ACME) is None
    assert world.lessons.card(BOSS).is_running
    await world.lessons.stop(BOSS)


async def test_a_lesson_that_runs_is_not_named_to_others(world):
    world.saving.set()
    await world.lessons.start(LESSON, BOSS)
    with pytest.raises(ConflictError) as refused:
        await world.lessons.start(OF_ACME, ACME)
    assert "policy" not in str(refused.value)
    for hidden in (LESSON, replace(LESSON, adapter="policy")):
        with pytest.raises(UnknownModelError):
            await world.lessons.start(hidden, ACME)
