"""Adapter versions in the server of an outside engine: what is sent, and when it goes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.extras.engines.sync import AdapterSync


class Api:
    """A server that notes what it has."""

    adapter_format = "peft"
    logprobs_at_temperature = True

    def __init__(self) -> None:
        self.has: list[str] = []

    async def load(self, adapter: Any) -> None:
        assert adapter.folder.is_dir(), "the files are there when the server is told"
        self.has.append(adapter.name)

    async def unload(self, adapter: Any) -> None:
        assert adapter.folder.is_dir(), "until the server has forgotten it"
        self.has.remove(adapter.name)


async def write(ref: AdapterRef, at: Path, form: str) -> None:
    at.mkdir(parents=True)


async def drawing(sync: AdapterSync, version: int, until: asyncio.Event | None = None) -> str | None:
    async with sync.use(AdapterRef("policy", version)) as adapter:
        if until:
            await until.wait()
        return adapter.name


async def test_an_older_version_goes_when_nobody_draws_with_it(tmp_path: Path) -> None:
    api, until = Api(), asyncio.Event()
    sync = AdapterSync(api, tmp_path / "sent", write)
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
