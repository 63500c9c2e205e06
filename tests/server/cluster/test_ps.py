"""`mlx_parallm ps --cluster` reads the real route."""

import asyncio
import json

import pytest
from server.fake_cluster import FakeCluster, app_of

from mlx_parallm.cli.main import main
from mlx_parallm.server.address import bind
from mlx_parallm.server.run import DrainingServer


@pytest.mark.parametrize("flags", [[], ["--json"]])
async def test_ps_shows_this_cluster(engine, adapters, capsys, flags):
    listening = bind("127.0.0.1", 0)
    started = asyncio.Event()
    server = DrainingServer(app_of(engine, adapters, FakeCluster()), started.set)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    await started.wait()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        assert await asyncio.to_thread(main, ["ps", "--cluster", "--url", url, *flags]) == 0
    finally:
        server.should_exit = True
        await task
    printed = capsys.readouterr().out
    if flags:
        assert json.loads(printed)["node"] == "head"
    else:
        assert printed.startswith(f"{url}  head, connected\n")
        assert "\nhead  head  http://10.0.0.1:8000  yes    7             0         1 of 1    1 of 1\n" in printed
        assert "\nunusable  a@1: why\n" in printed
