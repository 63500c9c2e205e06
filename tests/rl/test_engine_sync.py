"""Adapter versions in the server of an outside engine: what is sent, when it goes, and what a failure leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import EngineError
from mlx_parallm.extras.engines.sync import AdapterSync


class Api:
    """A server that notes what it has. `allowed`: loading waits for it."""

    adapter_format = "peft"
    logprobs_at_temperature = True

    def __init__(self) -> None:
        self.has: list[str] = []
        self.loads = 0
        self.allowed = asyncio.Event()
        self.allowed.set()
        self.fails = False

    async def load(self, adapter: Any) -> None:
        self.loads += 1
        await self.allowed.wait()
        if self.fails:
            raise EngineError("full")
        assert adapter.folder.is_dir(), "the files are there when the server is told"
        self.has.append(adapter.name)

    async def unload(self, adapter: Any) -> None:
        assert adapter.folder.is_dir(), "until the server has forgotten it"
        self.has.remove(adapter.name)


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def sync(api: Api, tmp_path: Path) -> AdapterSync:
    async def write(ref: AdapterRef, at: Path, form: str) -> None:
        await asyncio.sleep(0)
        at.mkdir(parents=True)

    return AdapterSync(api, tmp_path / "sent", write)


async def drawing(sync: AdapterSync, version: int, until: asyncio.Event | None = None) -> str | None:
    async with sync.use(AdapterRef("policy", version)) as adapter:
        if until:
            await until.wait()
        return adapter.name


async def test_a_version_is_sent_once(sync: AdapterSync, api: Api) -> None:
    names = await asyncio.gather(*(drawing(sync, 1) for _ in range(5)))
    assert api.loads == 1
    assert set(names) == set(api.has)
    await drawing(sync, 1)
    assert api.loads == 1, "nothing has changed since"


async def test_the_base_model_needs_no_files(sync: AdapterSync, api: Api, tmp_path: Path) -> None:
    async with sync.use(AdapterRef("base", 0)) as adapter:
        assert adapter is None
    assert (api.loads, list(tmp_path.iterdir())) == (0, [])


async def test_an_older_version_goes_when_nobody_draws_with_it(sync: AdapterSync, api: Api, tmp_path: Path) -> None:
    until = asyncio.Event()
    slow = asyncio.create_task(drawing(sync, 1, until))
    await asyncio.sleep(0.01)
    second = await drawing(sync, 2)
    assert len(api.has) == 2, "the first one draws still"
    until.set()
    first = await slow
    third = await drawing(sync, 3)
    assert len({first, second, third}) == 3
    assert api.has == [third]
    assert [path.name for path in (tmp_path / "sent").iterdir()] == [third]
    await sync.close()
    assert (api.has, (tmp_path / "sent").exists()) == ([], False)


async def test_a_failed_or_cancelled_load_leaves_no_files_and_may_be_tried_again(
    sync: AdapterSync, api: Api, tmp_path: Path
) -> None:
    api.fails = True
    with pytest.raises(EngineError, match="full"):
        await drawing(sync, 1)
    api.fails = False
    api.allowed.clear()
    cancelled = asyncio.create_task(drawing(sync, 1))
    await asyncio.sleep(0.01)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert list((tmp_path / "sent").iterdir()) == []
    api.allowed.set()
    assert await drawing(sync, 1) in api.has
