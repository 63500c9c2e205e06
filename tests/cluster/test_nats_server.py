"""The NATS server of a head: its state outlives it, and it ends with the head."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from cluster.conftest import address_of

from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.cluster.cards import SharedVersion
from mlx_parallm.extras.cluster.connection import NatsAddress, connect
from mlx_parallm.extras.cluster.nats_server import nats_server
from mlx_parallm.extras.cluster.state import locked_folder, own_token
from mlx_parallm.extras.cluster.versions import Versions

VERSION = SharedVersion("math", 1, "aa", 10)

_HEAD = """
import asyncio, sys
from pathlib import Path
from mlx_parallm.extras.cluster.nats_server import nats_server
async def main():
    async with nats_server(Path(sys.argv[1]), "127.0.0.1") as server:
        print(server.process.pid, server.listening.port, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_the_registry_and_the_address_outlive_a_restart(tmp_path):
    async with nats_server(tmp_path, "127.0.0.1") as server, connect(address_of(server), "test") as connection:
        await Versions(connection).stage(VERSION)
        live = await Versions(connection).go_live(VERSION, None)
        first = server.listening
    async with nats_server(tmp_path, "127.0.0.1") as server, connect(address_of(server), "test") as connection:
        assert server.listening == first
        assert await Versions(connection).live("math") == live


async def test_a_killed_server_is_started_again_and_followers_go_on(tmp_path):
    async with nats_server(tmp_path, "127.0.0.1") as server, connect(address_of(server), "test") as connection:
        following = Versions(connection).follow()
        await anext(following)
        await Versions(connection).stage(VERSION)
        assert (await anext(following)).staged
        server.process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(20):
            assert (await anext(following)).staged == {VERSION.ref: VERSION}
        assert server.restarts == 1
        await following.aclose()


async def test_a_wrong_token_is_refused(tmp_path):
    async with nats_server(tmp_path, "127.0.0.1") as server:
        url = address_of(server).url
        with pytest.raises(ConfigError, match="check that it runs there, and the token"):
            async with connect(NatsAddress(url, "wrong"), "test"):
                pass


def test_the_server_ends_with_a_head_that_is_killed(tmp_path):
    head = subprocess.Popen([sys.executable, "-c", _HEAD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    server = int(head.stdout.readline().split()[0])
    head.kill()
    head.wait()
    deadline = time.monotonic() + 20
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(server, 0)
            time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
    head.stdout.close()


def test_a_folder_has_one_user_and_one_token(tmp_path):
    with locked_folder(tmp_path / "state") as folder:
        assert own_token(folder) == own_token(folder)
        assert (folder / "token").stat().st_mode & 0o077 == 0
        with pytest.raises(ConfigError, match="another process uses"), locked_folder(folder):
            pass
    with locked_folder(folder):
        pass
