"""Changes of training: what becomes of their errors."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from mlx_parallm.rl.parts import Changes


async def failing(began: asyncio.Event | None = None, go_on: asyncio.Event | None = None) -> None:
    if began is not None and go_on is not None:
        began.set()
        await go_on.wait()
    raise OSError("no disk")


async def test_an_error_that_nobody_waits_for_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    changes = Changes()
    await asyncio.wait([changes.spawn(failing())])
    await asyncio.sleep(0)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "a change of training failed" in caplog.text
    assert "Traceback" in caplog.text
    assert "OSError: no disk" in caplog.text


async def test_the_error_of_a_change_is_its_callers_and_is_logged_if_they_have_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = Changes()
    with pytest.raises(OSError, match="no disk"):
        await changes.finished(failing())
    assert caplog.records == []
    began, go_on = asyncio.Event(), asyncio.Event()
    caller = asyncio.create_task(changes.finished(failing(began, go_on)))
    await began.wait()
    caller.cancel()
    with suppress(asyncio.CancelledError):
        await caller
    assert caplog.records == []
    go_on.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert "OSError: no disk" in caplog.text
    assert not changes._tasks
