"""What selectors mean, through publishes, rollbacks, unloads, routes and leases."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from mlx_parallm.adapters.books import KEPT_VERSIONS, AdapterBooks
from mlx_parallm.adapters.versions import Version, VersionInfo
from mlx_parallm.core import BASE_ADAPTER, AdapterRef
from mlx_parallm.errors import ConflictError, InvalidRequestError, UnknownModelError


def info(root: str = "", digest: str = "") -> VersionInfo:
    return VersionInfo(4, 8.0, ("q_proj",), 100, digest, root)


def publish(books: AdapterBooks, name: str, root: str = "", digest: str = "") -> Version:
    version = books.add(name, info(root, digest))
    books.flip(version.ref)
    return version


def meaning(books: AdapterBooks, selector: str) -> str:
    return str(books.find(selector).ref)


def test_a_name_means_its_live_version_and_a_number_that_very_one() -> None:
    books = AdapterBooks()
    for _ in range(3):
        publish(books, "math")
    waiting = books.add("math", info())
    assert meaning(books, "math") == "math@3"
    assert meaning(books, "math@2") == "math@2"
    assert meaning(books, "math@4") == str(waiting.ref), "staged, not flipped to"
    assert books.find("base").ref == BASE_ADAPTER


@pytest.mark.parametrize(
    "selector", ["", "tone", "math@", "math@0", "math@99", "math@1.0", "math@-1", "math@+1", "math@१", "math@1@1",
                 "@1", "math@" + "9" * 400, "MATH", "math ", "base@1", "latest", "checkpoint-1", "../math", "math\x00"],
)  # fmt: skip
def test_anything_else_means_nothing(selector: str) -> None:
    books = AdapterBooks()
    publish(books, "math")
    with pytest.raises(UnknownModelError):
        books.find(selector)
    with pytest.raises(UnknownModelError), books.lease(selector):
        pass


def test_a_version_that_is_not_live_yet_is_not_what_the_name_means() -> None:
    books = AdapterBooks()
    version = books.add("math", info())
    with pytest.raises(UnknownModelError):
        books.find("math")
    books.discard(version.ref)
    with pytest.raises(UnknownModelError):
        books.find("math@1")
    assert publish(books, "math").ref.version == 2, "numbers are never used twice"


def test_old_versions_are_forgotten_unless_somebody_needs_them() -> None:
    books = AdapterBooks()
    publish(books, "math")
    second = publish(books, "math")
    books.set_route({"math@2": 1.0})
    with books.lease("math@1"):
        for _ in range(200):
            publish(books, "math")
        numbers = [version.ref.version for version in books.versions()]
        assert numbers == [1, 2, *range(203 - KEPT_VERSIONS, 203)]
    assert [version.ref.version for version in books.versions()] == [2, *range(203 - KEPT_VERSIONS, 203)]
    assert books.needed(second)
    books.check_integrity()


def test_a_lease_outlives_an_unload() -> None:
    books = AdapterBooks()
    publish(books, "math")
    with books.lease("math") as version:
        assert books.unload("math") == (version,)
        with pytest.raises(UnknownModelError):
            books.find("math")
        assert books.version(version.ref) is version, "its request can still be served"
        assert books.needed(version)
        books.check_integrity()
    assert books.version(version.ref) is None
    assert publish(books, "math").ref.version == 2


def test_one_version_can_be_unloaded_but_not_the_live_or_a_routed_one() -> None:
    books = AdapterBooks()
    for _ in range(3):
        publish(books, "math")
    books.unload("math@1")
    with pytest.raises(ConflictError, match="live"):
        books.unload("math@3")
    books.set_route({"math@2": 1.0})
    for selector in ("math@2", "math"):
        with pytest.raises(ConflictError, match="route"):
            books.unload(selector)
    with pytest.raises(UnknownModelError):
        books.unload("base")
    books.set_route({"base": 1.0})
    assert len(books.unload("math")) == 2


def test_rollback_goes_back_one_version_at_a_time() -> None:
    books = AdapterBooks()
    for _ in range(3):
        publish(books, "math")
    assert str(books.rollback("math", lambda _: True).ref) == "math@2"
    assert meaning(books, "math") == "math@2"
    with pytest.raises(ConflictError, match="replaced"):
        books.rollback("math", lambda _: False)
    assert str(books.rollback("math", lambda _: True).ref) == "math@1"
    with pytest.raises(ConflictError, match="no earlier"):
        books.rollback("math", lambda _: True)
    assert str(publish(books, "math").ref) == "math@4"
    assert str(books.rollback("math", lambda _: True).ref) == "math@1"
    with pytest.raises(UnknownModelError):
        books.rollback("tone", lambda _: True)


def test_swaps_count_changes_of_meaning() -> None:
    books = AdapterBooks()
    version = publish(books, "math")
    assert books.swaps == 0, "nothing was replaced"
    books.flip(version.ref)
    assert books.swaps == 0
    publish(books, "math")
    books.rollback("math", lambda _: True)
    books.set_route({"math": 1.0})
    books.rollback_route()
    assert books.swaps == 4


def test_a_version_that_is_unloaded_while_it_is_staged_never_goes_live() -> None:
    books = AdapterBooks()
    publish(books, "math")
    staged = books.add("math", info())
    books.unload("math")
    with pytest.raises(UnknownModelError, match="unloaded"):
        books.flip(staged.ref)
    with pytest.raises(UnknownModelError):
        books.find("math")
    books.discard(staged.ref)
    books.check_integrity()


def test_files_that_get_new_content_supersede_what_was_read_from_them() -> None:
    books = AdapterBooks()
    first = publish(books, "math", "/a", "1")
    other = publish(books, "tone", "/b", "2")
    publish(books, "the same under another name", "/a", "1")
    published = publish(books, "policy")
    assert (first.readable, other.readable, published.readable) == (True, True, False)
    publish(books, "math", "/a", "3")
    assert (first.readable, other.readable) == (False, True)
    books.saved(first, "/ckpt/math/checkpoint-1", "checkpoint-1")
    assert first.readable


# ---- the route ----------------------------------------------------------------------------------


def test_requests_without_a_name_are_shared_out_by_weight() -> None:
    books = AdapterBooks()
    publish(books, "math")
    publish(books, "math")
    assert books.choose() == "base"
    shares, versions = books.check_route({"math@1": 3, "math": 1, "base": 0})
    assert shares == {"math@1": 0.75, "math": 0.25}
    assert [str(version.ref) for version in versions] == ["math@1", "math@2"]
    books.set_route(shares)
    drawn = Counter()
    for _ in range(4000):
        with books.lease(None) as version:
            drawn[str(version.ref)] += 1
    assert 2800 < drawn["math@1"] < 3200
    assert drawn.keys() == {"math@1", "math@2"}


def test_a_route_to_a_name_follows_its_flips() -> None:
    books = AdapterBooks()
    publish(books, "math")
    books.set_route({"math": 1.0})
    publish(books, "math")
    with books.lease(None) as version:
        assert str(version.ref) == "math@2"


def test_routes_that_lead_nowhere_are_refused() -> None:
    books = AdapterBooks()
    publish(books, "math")
    for weights, error in (
        ({"tone": 1}, UnknownModelError),
        ({"math": 0}, InvalidRequestError),
        ({}, InvalidRequestError),
    ):
        with pytest.raises(error):
            books.check_route(weights)
    with pytest.raises(ConflictError):
        books.rollback_route()
    books.set_route({"math": 1.0})
    assert books.rollback_route() == {"base": 1.0}


# ---- checkpoints --------------------------------------------------------------------------------


def test_checkpoints_of_the_default_adapter_are_selectors() -> None:
    on_disk = {("policy", "checkpoint-30"): 7, ("policy", "best"): 7, ("policy", "latest"): 9}

    def find(name: str, which: str) -> tuple[AdapterRef, VersionInfo] | None:
        number = on_disk.get((name, which))
        return (AdapterRef(name, number), info(f"/ckpt/{number}")) if number else None

    books = AdapterBooks("policy", find, first_version=lambda name: 10 if name == "policy" else 1)
    assert meaning(books, "checkpoint-30") == meaning(books, "best") == meaning(books, "policy@7") == "policy@7"
    assert meaning(books, "latest") == "policy@9"
    with pytest.raises(UnknownModelError):
        books.find("policy")
    assert publish(books, "policy").ref.version == 10
    assert publish(books, "math").ref.version == 1
    with pytest.raises(UnknownModelError):
        books.find("checkpoint-31")


def test_a_restored_version_is_live_under_its_own_number() -> None:
    books = AdapterBooks()
    books.flip(books.know(AdapterRef("math", 5), info("/ckpt/math")).ref)
    assert meaning(books, "math") == "math@5"
    assert publish(books, "math").ref.version == 6


def test_threads_may_lease_while_others_publish_and_unload() -> None:
    books = AdapterBooks()
    publish(books, "math")
    faults: list[Exception] = []

    def lease() -> None:
        for _ in range(500):
            try:
                with books.lease("math") as version:
                    assert books.version(version.ref) is version
            except UnknownModelError:
                continue
            except Exception as error:  # noqa: BLE001 - told to the test below
                faults.append(error)

    threads = [threading.Thread(target=lease) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(500):
        publish(books, "math")
        if number % 7 == 0:
            books.unload("math")
    for thread in threads:
        thread.join()
    assert not faults
    books.check_integrity()
    assert all(version.leases == 0 for version in books.versions())
