"""A node follows the registry: what it fetches, holds, makes live and lets go."""

import asyncio
from contextlib import suppress

import pytest
from extras.cluster.test_archive import GOOD

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import AdapterFileError, EngineError, StorageError, UnknownModelError
from mlx_parallm.extras.cluster.cards import SharedVersion, VersionState
from mlx_parallm.extras.cluster.follower import RegistryFollower
from mlx_parallm.extras.cluster.head_client import HeadUnreachableError


class Adapters:
    """Those of a node. `done`: what was asked of it. `bad`: numbers of versions that it cannot hold. `unloaded`: what
    somebody has unloaded there."""

    def __init__(self):
        self.done = []
        self.bad = set()
        self.unloaded = set()
        self.lives = {}

    def live(self, name):
        return self.lives.get(name)

    async def hold(self, ref, folder):
        assert len(list(folder.iterdir())) == 2
        if ref.version in self.bad:
            raise AdapterFileError("it is for another model")
        self.unloaded.discard(ref)
        self.done.append(f"hold {ref}")

    async def flip(self, ref):
        if ref in self.unloaded:
            raise UnknownModelError(f"{ref} was unloaded")
        self.lives[ref.name] = ref
        self.done.append(f"flip {ref}")

    def release(self, ref):
        self.done.append(f"release {ref}")


def version(number, sha256="a"):
    return SharedVersion("math", number, sha256, 10)


def state(live, *staged):
    names = {} if live is None else {"math": live}
    return VersionState(names, {each.ref: each for each in staged})


@pytest.fixture
async def node(tmp_path):
    """`node(state)` → what the follower did about it; `.follower`, `.adapters` and `.fetch_errors` are its parts."""
    states, adapters, errors, settled = asyncio.Queue(), Adapters(), [], asyncio.Event()

    async def fetch(wanted):
        if errors:
            raise errors.pop(0)
        return GOOD

    async def changed():
        settled.set()

    async def following():
        while True:
            yield await states.get()

    async def tell(state):
        adapters.done.clear()
        states.put_nowait(state)
        async with asyncio.timeout(10):
            while tell.follower.state is not state:
                await asyncio.sleep(0)
            settled.clear()
            while not settled.is_set() or states.qsize():
                await asyncio.sleep(0.001)
        return list(adapters.done)

    tell.follower, tell.adapters, tell.fetch_errors = (
        RegistryFollower(adapters, fetch, tmp_path, changed),
        adapters,
        errors,
    )
    task = asyncio.create_task(tell.follower.run(following()))
    yield tell
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert not list(tmp_path.iterdir())


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_versions_are_held_before_they_go_live_and_released_when_they_are_removed(node):
    await node(state(None, version(1)))
    await until(lambda: node.follower.holds == ("math@1",))
    assert node.adapters.live("math") is None
    await node(state(version(1), version(1)))
    await until(lambda: node.adapters.live("math") == AdapterRef("math", 1))
    await node(state(version(2), version(2), version(3)))
    await until(lambda: node.follower.holds == ("math@2", "math@3"))
    assert node.adapters.done == ["release math@1", "hold math@2", "hold math@3", "flip math@2"]


async def test_a_version_that_cannot_be_used_costs_no_other_one(node):
    node.adapters.bad.add(1)
    await node(state(version(1), version(1), version(2)))
    await until(lambda: node.follower.holds == ("math@2",))
    assert "another model" in node.follower.unusable[AdapterRef("math", 1)]
    await node(state(version(2), version(2)))
    await until(lambda: not node.follower.unusable)


async def test_another_content_under_the_same_number_is_not_taken_for_the_same(node):
    await node(state(version(1), version(1)))
    await until(lambda: node.follower.holds)
    await node(state(version(1, "b"), version(1, "b")))
    await until(lambda: node.adapters.done[:2] == ["release math@1", "hold math@1"])


async def test_a_version_that_a_fault_of_the_node_kept_out_is_held_when_it_is_over(node, monkeypatch):
    monkeypatch.setattr("mlx_parallm.extras.cluster.follower._TRY_AGAIN_S", 0.2)
    node.fetch_errors += [
        OSError(28, "No space left on device"),
        StorageError("the disk is full"),
        EngineError("the archive of math@1 arrived damaged"),
        RuntimeError("[metal::malloc] the device has no memory"),
    ]
    await node(state(None, version(1)))
    await until(lambda: node.follower.unusable)
    await until(lambda: node.follower.holds == ("math@1",))
    assert not node.follower.unusable


async def test_a_node_has_followed_when_it_serves_what_it_could_of_the_registry(node):
    node.fetch_errors.append(HeadUnreachableError("no head answers"))
    assert not node.follower.followed.is_set()
    node.adapters.bad.add(1)
    await node(state(version(2), version(1), version(2)))
    await node.follower.followed.wait()
    assert node.adapters.live("math") == AdapterRef("math", 2)


async def test_what_fails_when_a_version_goes_live_is_tried_again_and_ends_nothing(node, monkeypatch):
    monkeypatch.setattr("mlx_parallm.extras.cluster.follower._AGAIN_S", 0.01)
    flip, faults = node.adapters.flip, [RuntimeError("the device has failed"), OSError(30, "Read-only file system")]

    async def fails_at_first(ref):
        if faults:
            raise faults.pop(0)
        await flip(ref)

    node.adapters.flip = fails_at_first
    await node(state(version(1), version(1)))
    await until(lambda: node.adapters.live("math") == AdapterRef("math", 1))
    await node(state(version(2), version(1), version(2)))
    await until(lambda: node.adapters.live("math") == AdapterRef("math", 2))


async def test_an_adapter_that_somebody_unloads_on_a_node_comes_back_and_costs_no_other_one(node, monkeypatch):
    monkeypatch.setattr("mlx_parallm.extras.cluster.follower._TRY_AGAIN_S", 0.2)
    other = SharedVersion("tone", 1, "a", 10)
    await node(state(version(1), version(1)))
    await until(lambda: node.adapters.live("math") == AdapterRef("math", 1))
    node.adapters.unloaded.add(AdapterRef("math", 1))
    del node.adapters.lives["math"]
    await node(VersionState({"math": version(1), "tone": other}, {each.ref: each for each in (version(1), other)}))
    await until(lambda: node.adapters.live("tone") == other.ref)
    await until(lambda: node.adapters.live("math") == AdapterRef("math", 1))
    assert node.follower.unusable == {}


async def test_a_head_that_is_starting_again_is_asked_again(node):
    node.fetch_errors.append(HeadUnreachableError("no head answers"))
    await node(state(None, version(1)))
    await until(lambda: node.follower.holds == ("math@1",))
