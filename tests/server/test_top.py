"""`mlx_parallm top` reads the real routes."""

import asyncio
import json

import pytest

from mlx_parallm.cli.main import main


@pytest.mark.parametrize("form", ["--once", "--json"])
async def test_top_shows_this_server(serving, adapters, capsys, form):
    adapters.publish("tone")
    async with serving() as server:
        assert await asyncio.to_thread(main, ["top", form, "--url", server.url]) == 0
    printed = capsys.readouterr().out
    if form == "--once":
        assert printed.startswith(f"{server.url}  tiny/byte-model")
        assert "\nrows      3 of 128 run, 0 wait, 0 of 640 places taken" in printed
        assert "\nadapters  1 live; requests now: none" in printed
        assert "\ntraining  policy " in printed
    else:
        answer = json.loads(printed)
        assert (answer["stats"]["queue"]["running"], list(answer["training"])) == (3, ["policy"])
