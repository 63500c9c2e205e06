"""The NATS server of a head: its state outlives it, and it ends with the head."""

import asyncio
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import httpx
import pytest
from extras.cluster.conftest import address_of
from nats.errors import Error as NatsError

from mlx_parallm.errors import ConfigError, StorageError
from mlx_parallm.extras.cluster import nats_watch
from mlx_parallm.extras.cluster.cards import SharedVersion
from mlx_parallm.extras.cluster.connection import NatsAddress, connect
from mlx_parallm.extras.cluster.nats_server import find_program, nats_server
from mlx_parallm.extras.cluster.node import running
from mlx_parallm.extras.cluster.state import locked_folder, own_token
from mlx_parallm.extras.cluster.trajectories import Trajectories
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
        kept = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert len(kept) > 3
        assert [file for file in kept if file.stat().st_mode & 0o007] == [], "the token and prompts are in them"
    async with nats_server(tmp_path, "127.0.0.1") as server, connect(address_of(server), "test") as connection:
        assert server.listening == first
        assert await Versions(connection).live("math") == live
    assert server.process.returncode != -signal.SIGKILL, "it was asked to end"


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


async def test_what_is_acknowledged_is_on_the_disk(tmp_path):
    """As NATS itself says of the configuration that it was given."""
    async with nats_server(tmp_path, "127.0.0.1"):
        settings = json.loads((tmp_path / "nats.conf").read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as probe:
        monitoring = f"127.0.0.1:{probe.getsockname()[1]}"
    (tmp_path / "monitored.conf").write_text(json.dumps({**settings, "http": monitoring}))
    process = await asyncio.create_subprocess_exec(find_program(), "-c", tmp_path / "monitored.conf")
    try:
        transport = httpx.AsyncHTTPTransport(retries=8)
        async with httpx.AsyncClient(transport=transport) as client:
            answer = await client.get(f"http://{monitoring}/jsz")
        assert answer.json()["config"]["sync_always"]
    finally:
        process.kill()
        await process.wait()


async def test_work_that_misses_a_cancellation_ends_with_the_block():
    async def work():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    async with asyncio.timeout(20), running(work()):
        await asyncio.sleep(0)


@pytest.fixture
def impatient(monkeypatch):
    """The watch waits less, and so does each request to NATS."""
    monkeypatch.setattr(nats_watch, "PROBE_S", 0.05)
    monkeypatch.setattr(nats_watch, "STUCK_S", 0.5)
    monkeypatch.setattr(nats_watch, "RETURN_S", 3.0)
    monkeypatch.setattr(nats_watch, "_AGAIN_S", 0.05)
    monkeypatch.setattr("mlx_parallm.extras.cluster.connection._TIMEOUT_S", 0.5)


async def until_restarted(server, restarts, monkeypatch):
    """Waits for one more restart than these, after which the watch is patient."""
    async with asyncio.timeout(60):
        while server.restarts <= restarts:
            await asyncio.sleep(0.02)
    monkeypatch.setattr(nats_watch, "RETURN_S", 60.0)


async def until_it_works(action, *arguments):
    async with asyncio.timeout(60):
        while True:
            with suppress(NatsError, StorageError):
                return await action(*arguments)
            await asyncio.sleep(0.05)


async def until_it_fails(action):
    async with asyncio.timeout(20):
        while True:
            await action()


@asynccontextmanager
async def watched(folder):
    async with (
        nats_server(folder, "127.0.0.1") as server,
        connect(address_of(server), "test") as connection,
        running(nats_watch.keep_storing(connection, server, folder)),
    ):
        yield server, connection


async def test_a_server_that_stands_still_is_started_again_unless_the_disk_is_full(tmp_path, impatient, monkeypatch):
    free = [0]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free[0]))
    async with watched(tmp_path) as (server, connection):
        await asyncio.sleep(1)
        assert server.restarts == 0, "it stores"
        server.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.5)
        assert server.restarts == 0, "a restart would not make room"
        free[0] = 1 << 30
        await until_restarted(server, 0, monkeypatch)
        await until_it_works(connection.probe)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_shows_that_nats_stores_is_seen_by_nobody(connection):
    states = Versions(connection).follow()
    await anext(states)
    await connection.probe()
    await Versions(connection).stage(replace(VERSION, name="probed"))
    assert [ref.name for ref in (await anext(states)).staged] == ["probed"], "no state of its own"
    assert (await connection.js.stream_info("trajectories")).state.messages == 0
    await states.aclose()


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small file system, as root")
async def test_a_server_whose_disk_was_full_stores_again_when_there_is_room(tmp_path, impatient, monkeypatch):
    folder, filler = tmp_path / "small", tmp_path / "small" / "filler"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)], check=True)
    try:
        async with watched(folder / "nats") as (server, connection):
            trajectories = Trajectories(connection)
            await until_it_works(trajectories.send, "math", b"1", "1")
            fill(filler)
            with pytest.raises(NatsError):
                await until_it_fails(connection.probe)
            restarts = server.restarts  # a busy machine may have had one before
            filler.unlink()
            await until_restarted(server, restarts, monkeypatch)
            await until_it_works(trajectories.send, "math", b"2", "2")
            assert await trajectories.waiting(["math"]) == {"math": 2}
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(file):
    """Writes until the disk is full."""
    with open(file, "wb", buffering=0) as opened, suppress(OSError):
        while True:
            opened.write(bytes(4096))


def can_listen_on(host):
    with suppress(OSError), socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
        return True
    return False


@pytest.mark.parametrize("host", ["127.0.0.2", "0.0.0.0", "::1", "::"])
async def test_a_server_on_any_address_of_this_machine_is_found(tmp_path, host):
    if not can_listen_on(host):
        pytest.skip(f"this machine has no {host}")
    async with nats_server(tmp_path, host) as server, connect(address_of(server), "test") as connection:
        assert await Versions(connection).live("math") is None


async def test_a_server_that_starts_slowly_is_watched_all_the_same(tmp_path, monkeypatch):
    async def silent(host, port):
        return False

    async with nats_server(tmp_path, "127.0.0.1") as server:
        monkeypatch.setattr("mlx_parallm.extras.cluster.nats_server._answers", silent)
        monkeypatch.setattr("mlx_parallm.extras.cluster.nats_server._START_S", 0.1)
        begun = time.monotonic()
        server.kill()
        async with asyncio.timeout(10):
            while not begun < server.ready_at < math.inf:
                await asyncio.sleep(0.02)


async def test_a_head_that_is_started_again_waits_for_the_port_of_the_server_before_it(tmp_path):
    async with nats_server(tmp_path, "127.0.0.1") as server:
        first = server.listening
    lingering = socket.create_server(("127.0.0.1", first.port))
    asyncio.get_running_loop().call_later(0.5, lingering.close)
    async with nats_server(tmp_path, "127.0.0.1") as server:
        assert server.listening == first


async def test_a_port_that_another_program_keeps_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_parallm.extras.cluster.nats_server._PORT_S", 0.3)
    async with nats_server(tmp_path, "127.0.0.1") as server:
        first = server.listening
    with socket.create_server(("127.0.0.1", first.port)):
        async with nats_server(tmp_path, "127.0.0.1") as server:
            assert server.listening.port != first.port
            assert server.listening.token == first.token


@pytest.mark.parametrize("content", ["", "[]", '{"port": 1}'])
async def test_a_damaged_file_of_its_port_is_said_to_be(content, tmp_path):
    (tmp_path / "nats.json").write_text(content)
    with pytest.raises(ConfigError, match=r"nats\.json is damaged: remove it"):
        async with nats_server(tmp_path, "127.0.0.1"):
            pass


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
