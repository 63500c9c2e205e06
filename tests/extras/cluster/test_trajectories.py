"""The stream of trajectories and the lease of a trainer, on a real NATS server."""

import asyncio
from contextlib import aclosing

import pytest
from extras.cluster.conftest import address_of

from mlx_parallm.errors import ConflictError, StorageError
from mlx_parallm.extras.cluster import trainer
from mlx_parallm.extras.cluster.cards import SharedVersion
from mlx_parallm.extras.cluster.connection import connect
from mlx_parallm.extras.cluster.nats_server import nats_server
from mlx_parallm.extras.cluster.trainer import TrainerLease
from mlx_parallm.extras.cluster.trajectories import Trajectories
from mlx_parallm.extras.cluster.versions import Versions

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def bodies(stream, name, fence, count):
    async with aclosing(stream.read(name, fence)) as deliveries:
        return [await anext(deliveries) for _ in range(count)]


async def until_waiting(stream, name, count):
    """NATS takes what was acknowledged out of the stream some time after it has the acknowledgement."""
    async with asyncio.timeout(20):
        while (await stream.waiting([name]))[name] != count:
            await asyncio.sleep(0.05)


async def test_what_is_not_acknowledged_comes_again_to_the_next_reader(connection):
    stream = Trajectories(connection)
    for number in range(5):
        await stream.send("kept", b"%d" % number, f"kept-{number}")
    first = await bodies(stream, "kept", 1, 5)
    assert [each.body for each in first] == [b"0", b"1", b"2", b"3", b"4"]
    for each in first[:2]:
        await each.acknowledge()
    await until_waiting(stream, "kept", 3)
    assert await stream.waiting(["kept", "none"]) == {"kept": 3, "none": 0}
    assert [each.body for each in await bodies(stream, "kept", 2, 3)] == [b"2", b"3", b"4"]


async def test_a_message_is_kept_once_and_adapters_are_apart(connection):
    stream = Trajectories(connection)
    for _ in range(3):
        await stream.send("once", b"same", "once-1")
    await stream.send("a.dot", b"other", "dot-1")
    assert await stream.waiting(["once", "a.dot"]) == {"once": 1, "a.dot": 1}
    assert (await bodies(stream, "a.dot", 1, 1))[0].body == b"other"


async def test_a_reader_whose_lease_has_passed_on_gets_no_more(connection):
    stream = Trajectories(connection)
    await stream.send("passed", b"first", "passed-1")
    async with aclosing(stream.read("passed", 7)) as old:
        await anext(old)
        await bodies(stream, "passed", 8, 1)
        with pytest.raises(ConflictError, match="another trainer trains 'passed'"):
            await asyncio.wait_for(anext(old), 10)


async def test_what_no_message_may_hold_is_refused(connection):
    import os

    with pytest.raises(StorageError, match="takes no message of"):
        await Trajectories(connection).send("large", os.urandom(9 << 20), "large-1")


async def test_reading_goes_on_after_nats_was_killed(tmp_path):
    async with nats_server(tmp_path, "127.0.0.1") as server, connect(address_of(server), "test") as connection:
        stream, found = Trajectories(connection), set()

        async def read() -> None:
            async with aclosing(stream.read("killed", 1)) as deliveries:
                async for each in deliveries:
                    found.add(each.body)
                    await each.acknowledge()

        reading = asyncio.create_task(read())
        for number in range(60):
            await stream.send("killed", b"%d" % number, f"killed-{number}")
            if number in (20, 40):
                server.process.kill()
        async with asyncio.timeout(20):
            while len(found) < 60:
                await asyncio.sleep(0.05)
        await until_waiting(stream, "killed", 0)
        reading.cancel()
        assert server.restarts == 2


def lease_of(connection, name, holder):
    return TrainerLease(connection, Versions(connection), name, holder)


async def test_one_trainer_has_the_lease_and_its_own_next_process_takes_it_over(connection):
    first = lease_of(connection, "led", "run-a")
    await first.acquire(0)
    with pytest.raises(ConflictError, match=r"another trainer \(run-a\) trains 'led'"):
        await lease_of(connection, "led", "run-b").acquire(0)
    again = lease_of(connection, "led", "run-a")
    await again.acquire(0)
    assert again.fence > first.fence


async def test_a_trainer_that_lost_its_lease_cannot_publish_even_before_the_next_one_has(connection):
    versions = Versions(connection)
    old = lease_of(connection, "fence", "run-a")
    await old.acquire(0)
    published = [SharedVersion("fence", number, "aa", 10, old.fence) for number in (1, 2)]
    for version in published:
        await versions.stage(version)
    live = await versions.go_live(published[0], None)
    await connection.trainer.delete("fence")  # as when it ends by itself
    await lease_of(connection, "fence", "run-b").acquire(0)
    with pytest.raises(ConflictError, match="meanwhile"):
        await versions.go_live(published[1], live)
    with pytest.raises(ConflictError, match="lost its lease"):
        await versions.go_live(published[1], await versions.live("fence"))


async def test_a_lease_that_passed_to_another_ends_the_trainer(connection, monkeypatch):
    monkeypatch.setattr(trainer, "_RENEWAL_S", 0.05)
    lost = lease_of(connection, "ends", "run-a")
    await lost.acquire(0)
    running = asyncio.create_task(lost.run())
    await asyncio.sleep(0.2)
    assert not running.done()
    await connection.trainer.purge("ends")
    await lease_of(connection, "ends", "run-b").acquire(0)
    with pytest.raises(ConflictError, match=r"another trainer \(run-b\)"):
        await asyncio.wait_for(running, 5)


async def test_a_registry_that_is_slow_while_a_lease_is_taken_again_ends_no_trainer(connection, monkeypatch):
    monkeypatch.setattr(trainer, "_RENEWAL_S", 0.05)
    versions, faults, taken = Versions(connection), [StorageError("nats: timeout")] * 2, asyncio.Event()
    held = TrainerLease(connection, versions, "slow", "run-a")
    await held.acquire(0)
    take_over = versions.take_over

    async def slow_at_first(name, fence):
        if faults:
            raise faults.pop()
        await take_over(name, fence)
        taken.set()

    monkeypatch.setattr(versions, "take_over", slow_at_first)
    await connection.trainer.purge("slow")  # as when it ended while NATS stood still
    running = asyncio.create_task(held.run())
    await asyncio.wait_for(taken.wait(), 10)
    assert not running.done()
    with pytest.raises(ConflictError, match=r"another trainer \(run-a\)"):
        await lease_of(connection, "slow", "run-b").acquire(0)
    running.cancel()
    await asyncio.wait([running])


async def test_a_full_stream_refuses_what_comes_and_costs_no_other_adapter(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_parallm.extras.cluster.connection.MOST_WAITING", 3)
    monkeypatch.setattr("mlx_parallm.extras.cluster.trajectories._SEND_S", 0.3)
    async with nats_server(tmp_path, "127.0.0.1") as server, connect(address_of(server), "test") as connection:
        stream = Trajectories(connection)
        for number in range(3):
            await stream.send("full", b"%d" % number, f"full-{number}")
        with pytest.raises(StorageError, match="maximum messages"):
            await stream.send("full", b"more", "full-3")
        await stream.send("other", b"fits", "other-1")
        assert [each.body for each in await bodies(stream, "full", 1, 3)] == [b"0", b"1", b"2"]
