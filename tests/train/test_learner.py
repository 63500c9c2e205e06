"""The event loop's half steps: gradients, optimizer steps and logprobs that are awaited, cancelled, and fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from configs import changed
from trainers import (
    SETTINGS,
    assert_close,
    failing,
    learn,
    leaves,
    make_policy,
    make_trainer,
    plain_logprobs,
    samples,
    with_logprobs,
)

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.device import completed
from mlx_parallm.errors import StepFailedError
from mlx_parallm.train.data import UpdateBatch
from mlx_parallm.train.learner import Learner
from mlx_parallm.train.losses import UpdateTotals
from mlx_parallm.train.trainer import GRPOTrainer

LOSS, OPTIMIZER = SETTINGS.loss, SETTINGS.optimizer
SMALL = changed(SETTINGS, micro_batch_tokens=1)
"""One sample in each micro-step, so that there are many units."""


class Device:
    """`core.DeviceThread` on the event loop's thread: calls run between two units of the trainer, in order."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self._calls: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self.held = False
        """Whether no unit runs."""

    async def run(self, call: Callable[[], Any]) -> Any:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.append((call, done))
        return await done

    async def work(self) -> None:
        while True:
            for call, done in self._calls:
                _complete(call, done)
            self._calls.clear()
            if self._trainer.waits() and not self.held:
                try:
                    self._trainer.advance()
                except RuntimeError:
                    self._trainer.reset()
            await asyncio.sleep(0)


def _complete(call: Callable[[], Any], done: asyncio.Future[Any]) -> None:
    try:
        result = call()
    except (RuntimeError, ValueError) as error:
        if not done.done():
            done.set_exception(error)
        return
    if isinstance(result, Future):
        result.add_done_callback(lambda ended: _pass_on(ended, done))
    elif not done.done():
        done.set_result(result)


def _pass_on(ended: Future[Any], done: asyncio.Future[Any]) -> None:
    if done.done():
        return
    if error := ended.exception():
        done.set_exception(error)
    else:
        done.set_result(ended.result())


@asynccontextmanager
async def running(trainer: GRPOTrainer) -> AsyncIterator[tuple[Learner, Device]]:
    device = Device(trainer)
    trainer.pace(1e-9)  # one stage in each unit
    working = asyncio.create_task(device.work())
    try:
        yield Learner(device, trainer), device
    finally:
        working.cancel()


async def some_units() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def cancelled(asked: Coroutine[Any, Any, Any]) -> None:
    """Cancels what was asked for while the device works on it."""
    task = asyncio.create_task(asked)
    await some_units()
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_two_halves_make_the_update_that_one_call_makes() -> None:
    (one, model), (other, _) = make_trainer(SMALL), make_trainer(SMALL)
    policy, again = make_policy(one, moved=0.05), make_policy(other, moved=0.05)
    drawn = with_logprobs(one, model, policy, samples(6))
    outcome = learn(one, policy, drawn)
    async with running(other) as (learner, _):
        assert await learner.logprobs("default", drawn[:1]) == [
            pytest.approx(plain_logprobs(one, model, again.params, drawn[0]), abs=1e-4)
        ]
        totals = UpdateTotals.of(drawn)
        added = [await learner.accumulate("default", part, LOSS, totals) for part in (drawn[:2], drawn[2:])]
        result = await learner.step("default", OPTIMIZER)
        base = await learner.logprobs(None, drawn[:1])
    assert_close(leaves(again), leaves(policy), 1e-5)
    assert sum(each.metrics["loss"] for each in added) == pytest.approx(outcome.metrics["loss"], rel=1e-5)
    assert (result.step, result.skipped) == (1, "")
    assert base == [pytest.approx(plain_logprobs(one, model, None, drawn[0]), abs=1e-4)]


async def test_a_cancelled_call_leaves_no_part_of_its_gradient() -> None:
    (one, model), (other, _) = make_trainer(SMALL), make_trainer(SMALL)
    policy, again = make_policy(one, moved=0.05), make_policy(other, moved=0.05)
    drawn = with_logprobs(one, model, policy, samples(6))
    learn(one, policy, drawn[:3])
    async with running(other) as (learner, _):
        await learner.accumulate("default", drawn[:3], LOSS)
        await cancelled(learner.accumulate("default", drawn[3:], LOSS))
        assert not other.waits()
        await learner.step("default", OPTIMIZER)
    assert_close(leaves(again), leaves(policy), 1e-6)


async def test_a_cancelled_update_is_given_up_at_once_and_changes_nothing() -> None:
    trainer, _ = make_trainer(SMALL)
    policy = make_policy(trainer, moved=0.05)
    before = leaves(policy)
    async with running(trainer) as (learner, _):
        await cancelled(learner.learn("default", UpdateBatch(tuple(samples(6)))))
        assert not trainer.waits()
    assert all(np.array_equal(leaf, before[name]) for name, leaf in leaves(policy).items())


async def test_a_call_that_fails_says_so_and_leaves_no_part_of_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, model), (other, _) = make_trainer(SMALL), make_trainer(SMALL)
    policy, again = make_policy(one, moved=0.05), make_policy(other, moved=0.05)
    drawn = with_logprobs(one, model, policy, samples(6))
    learn(one, policy, drawn[:3])
    async with running(other) as (learner, _):
        await learner.accumulate("default", drawn[:3], LOSS)
        with monkeypatch.context() as patched:
            failing(other, patched, other._forwards, "gradients")
            with pytest.raises(StepFailedError):
                await learner.accumulate("default", drawn[3:], LOSS)
        await learner.step("default", OPTIMIZER)
    assert_close(leaves(again), leaves(policy), 1e-6)


@pytest.mark.parametrize("version", [None, AdapterRef("default", 3)])
async def test_an_update_comes_with_the_version_that_was_published_of_it_if_any(version: AdapterRef | None) -> None:
    trainer, _ = make_trainer(SMALL)
    make_policy(trainer, moved=0.05)
    async with running(trainer) as (learner, _):
        outcome, live = await learner.learn(
            "default", UpdateBatch(tuple(samples(3))), lambda *_: None if version is None else completed(version)
        )
    assert (outcome.step, live) == (1, version)


async def test_names_that_are_not_open_are_refused() -> None:
    trainer, _ = make_trainer()
    async with running(trainer) as (learner, _):
        with pytest.raises(KeyError):
            await learner.accumulate("nobody", samples(2), LOSS)
