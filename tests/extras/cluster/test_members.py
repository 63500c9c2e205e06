"""Leases: who counts as present, and when a node is lost."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mlx_parallm.extras.cluster.cards import NodeInfo, NodeRole
from mlx_parallm.extras.cluster.connection import LEASE_S, Change
from mlx_parallm.extras.cluster.members import Lease, Members
from mlx_parallm.extras.cluster.records import to_json

NODE = NodeInfo("replica-1", NodeRole.REPLICA, "http://127.0.0.1:9", ("math@1",), 5, True, "first")


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def members(clock):
    return Members(None, "", clock=lambda: clock[0])


def renewed(members, info):
    members.note(Change(info.id, to_json(info), 1))


def test_a_node_that_says_nothing_for_the_length_of_its_lease_is_lost(members, clock):
    renewed(members, NODE)
    (member,) = members.present()
    for _ in range(5):
        clock[0] += LEASE_S
        renewed(members, replace(NODE, holds=("math@2",)))
        members.drop_silent()
    assert members.present() == (member,)
    assert member.info.holds == ("math@2",)
    clock[0] += LEASE_S + 0.01
    members.drop_silent()
    assert members.present() == ()
    assert member.lost.is_set()
    assert members.lost_total == 1


def test_nobody_is_lost_while_nothing_is_heard_of_anybody(clock):
    """NATS stands still, and the connection does not show it yet."""
    members = Members(SimpleNamespace(connected=True), "", clock=lambda: clock[0])
    other = replace(NODE, id="head", role=NodeRole.HEAD)
    renewed(members, NODE)
    renewed(members, other)
    for _ in range(100):
        clock[0] += 0.25
        members.sweep()
    renewed(members, other)
    members.sweep()
    assert [member.info.id for member in members.present()] == ["head", "replica-1"]
    for _ in range(70):
        clock[0] += 0.25
        renewed(members, other)
        members.sweep()
    assert [member.info.id for member in members.present()] == ["head"], "it has not come back"
    assert members.lost_total == 1


def test_a_node_that_was_started_anew_is_another_one(members):
    renewed(members, NODE)
    (before,) = members.present()
    renewed(members, replace(NODE, incarnation="second"))
    (after,) = members.present()
    assert before.lost.is_set()
    assert not after.lost.is_set()


def test_a_node_of_another_version_or_base_model_is_left_out_and_one_that_it_replaces_is_lost(clock, caplog):
    """A head that was started again with another one has the entries of those before it."""
    members = Members(None, "2.0 base", clock=lambda: clock[0])
    good = replace(NODE, build="2.0 base")
    renewed(members, good)
    (before,) = members.present()
    for build in ("1.0 base", "2.0 another", ""):
        for _ in range(3):
            renewed(members, replace(NODE, build=build, incarnation=build))
        assert members.present() == ()
    assert before.lost.is_set()
    assert sum("is left out" in message for message in caplog.messages) == 3
    renewed(members, good)
    assert [member.info for member in members.present()] == [good]


def test_what_another_version_of_the_package_wrote_is_left_out(members):
    members.note(Change("strange", b'{"id": 3}', 1))
    assert members.present() == ()


@pytest.mark.parametrize(("connected", "removed"), [(True, [NODE.id]), (False, [])])
async def test_a_node_that_leaves_because_nats_is_away_keeps_its_entry_and_its_requests(connected, removed):
    """Else NATS, when it is back, would have the head cut all that the node still answers."""
    deleted, renewed = [], asyncio.Event()

    async def put(*_):
        renewed.set()

    async def delete(node):
        deleted.append(node)

    bucket = SimpleNamespace(put=put, delete=delete)
    lease = asyncio.create_task(Lease(SimpleNamespace(connected=connected, nodes=bucket), lambda: NODE).run())
    await renewed.wait()
    lease.cancel()
    with suppress(asyncio.CancelledError):
        await lease
    assert deleted == removed


@pytest.mark.asyncio(loop_scope="module")
async def test_a_lease_is_seen_by_others_and_given_back(connection):
    said = [NODE]
    lease, members = Lease(connection, lambda: said[0]), Members(connection, "")
    tasks = [asyncio.create_task(lease.run()), asyncio.create_task(members.run())]

    async def until(condition):
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)

    await until(members.present)
    said[0] = replace(NODE, holds=("math@1", "math@2"))
    lease.tell()
    await until(lambda: members.present()[0].info == said[0])
    tasks[0].cancel()
    await until(lambda: not members.present())
    assert members.lost_total == 0
    tasks[1].cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
