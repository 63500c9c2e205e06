"""The registry of versions, on a real NATS server."""

from dataclasses import replace

import pytest

from mlx_parallm.errors import ConflictError
from mlx_parallm.extras.cluster.cards import SharedVersion
from mlx_parallm.extras.cluster.versions import KEPT, Versions

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def versions(connection):
    return Versions(connection)


def version_of(name, number, sha256="aa", fence=0):
    return SharedVersion(name, number, sha256, 10, fence)


async def staged(versions, *found):
    for version in found:
        await versions.stage(version)
    return found


async def test_of_two_publishers_that_saw_the_same_live_version_one_wins(versions):
    first, second, third = await staged(versions, *(version_of("race", number) for number in (1, 2, 3)))
    assert await versions.live("race") is None
    live = await versions.go_live(first, None)
    assert await versions.live("race") == live
    newer = await versions.go_live(second, live)
    with pytest.raises(ConflictError, match="another version of 'race' went live meanwhile"):
        await versions.go_live(third, live)
    with pytest.raises(ConflictError, match="meanwhile"):
        await versions.go_live(third, None)
    assert await versions.live("race") == newer


async def test_a_version_never_changes(versions):
    (version,) = await staged(versions, version_of("fixed", 1))
    await versions.stage(version)
    with pytest.raises(ConflictError, match="fixed@1 has another content already"):
        await versions.stage(replace(version, sha256="bb"))
    with pytest.raises(ConflictError, match="not staged"):
        await versions.go_live(replace(version, sha256="bb"), None)


async def test_followers_see_each_change_and_names_may_have_dots(versions):
    following = versions.follow()
    await anext(following)
    (version,) = await staged(versions, version_of("a.b.", 7))
    assert (await anext(following)).staged[version.ref] == version
    await versions.go_live(version, None)
    assert (await anext(following)).live["a.b."] == version
    await versions.take_over("a.b.", 1)
    assert "a.b." in (await anext(following)).trained
    await following.aclose()


async def test_old_versions_are_removed_and_the_newest_before_the_live_one_stay(versions):
    found = await staged(versions, *(version_of("many", number) for number in range(1, KEPT + 4)))
    await versions.go_live(found[-2], None)
    following = versions.follow()
    removed = await versions.remove_old(await anext(following), "many")
    assert [version.version for version in removed] == [1, 2]
    for _ in removed:
        state = await anext(following)
    left = sorted(ref.version for ref in state.staged if ref.name == "many")
    assert left == [3, 4, 5, 6]
    assert await versions.remove_old(state, "many") == ()
    await following.aclose()
