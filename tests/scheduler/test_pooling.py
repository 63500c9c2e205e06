"""Texts whose hidden states are pooled get a share of the time beside decode rows, and all of it when none decodes."""

from __future__ import annotations

import pytest
from driver import STEP, Driver

from mlx_parallm.core.requests import Pooling
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.sequence import SequenceStatus
from mlx_parallm.engine.units import ForwardUnit

ENDLESS = 10**9


def busy(rows: int, **config: object) -> Driver:
    driver = Driver(cost=CostModel(0.01, 0.001, 0.0), **config)
    for _ in range(rows):
        driver.add(1, ENDLESS)
    driver.step()
    return driver


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(("count", "tokens"), [(100, 5), (100, 32), (12, 300)])
def test_rows_keep_most_of_their_rate_while_many_texts_are_pooled(rows: int, count: int, tokens: int) -> None:
    driver = busy(rows)
    texts = [driver.add(tokens, 1, pooling=Pooling.LAST) for _ in range(count)]
    began, steps = driver.now, 0
    while not all(text.status is SequenceStatus.FINISHED for text in texts):
        unit = driver.step()
        steps += isinstance(unit, ForwardUnit) and unit.decodes > 0
    assert steps * STEP >= 0.8 * (driver.now - began)
    assert count * tokens * 0.001 >= 0.08 * (driver.now - began), "the texts get their share of the time, too"


def test_a_prompt_of_tokens_passes_texts_that_have_used_their_share() -> None:
    driver = busy(4)
    for _ in range(50):
        driver.add(60, 1, pooling=Pooling.LAST)
    for _ in range(20):
        driver.step()
    prompt = driver.add(60, 4)
    driver.step()
    assert prompt.status is SequenceStatus.RUNNING


def test_texts_leave_rows_to_others() -> None:
    driver = Driver(max_rows=40)
    for _ in range(200):
        driver.add(500, 1, pooling=Pooling.LAST)
    driver.step()
    prompt = driver.add(8, 4)
    driver.step()
    assert prompt.status is not SequenceStatus.WAITING
