"""What selectors mean, through publishes, rollbacks, unloads, routes and leases."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from mlx_parallm.adapters.registry import KEPT_VERSIONS, AdapterRegistry
from mlx_parallm.adapters.weights import Version, VersionInfo
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.errors import ConflictError, UnknownModelError


@pytest.fixture
def registry() -> Iterator[AdapterRegistry]:
    made = AdapterRegistry()
    yield made
    made.check_integrity()


def info(root: str = "", digest: str = "") -> VersionInfo:
    return VersionInfo(4, 8.0, ("q_proj",), 100, digest, root)


def publish(registry: AdapterRegistry, name: str, root: str = "", digest: str = "") -> Version:
    version = registry.add(name, info(root, digest))
    registry.flip(version.ref)
    return version


def meaning(registry: AdapterRegistry, selector: str) -> str:
    return str(registry.find(selector).ref)


def drawn(registry: AdapterRegistry) -> AdapterRef:
    """What a request that names no adapter gets."""
    with registry.lease(None) as version:
        return version.ref


def test_a_name_means_its_live_version_and_a_number_that_very_one(registry: AdapterRegistry) -> None:
    for _ in range(3):
        publish(registry, "math")
    waiting = registry.add("math", info())
    assert meaning(registry, "math") == "math@3"
    assert meaning(registry, "math@2") == "math@2"
    assert meaning(registry, "math@4") == str(waiting.ref), "staged, not flipped to"
    assert registry.find("base").ref == BASE_ADAPTER


@pytest.mark.parametrize(
    "selector", ["", "tone", "math@", "math@0", "math@99", "math@1.0", "math@-1", "math@+1", "math@१", "math@1@1",
                 "@1", "math@" + "9" * 400, "MATH", "math ", "base@1", "latest", "checkpoint-1", "../math", "math\x00"],
)  # fmt: skip
def test_anything_else_means_nothing(registry: AdapterRegistry, selector: str) -> None:
    publish(registry, "math")
    with pytest.raises(UnknownModelError):
        registry.find(selector)
    with pytest.raises(UnknownModelError), registry.lease(selector):
        pass


def test_the_error_about_an_unknown_name_lists_a_bounded_number_of_known_ones() -> None:
    registry = AdapterRegistry(model_names=("my-model", "alias" * 100))
    publish(registry, "math")
    registry.add("staged", info())
    with pytest.raises(UnknownModelError, match=r"'tone'; there are my-model, (alias){16}, base, math: see GET"):
        registry.find("tone")
    for number in range(50):
        publish(registry, f"adapter-{number}")
    with pytest.raises(UnknownModelError, match=r"adapter-0, .* and 44 more: see GET") as caught:
        registry.find("x" * 1000)
    assert len(str(caught.value)) < 1200


def test_a_version_that_is_not_live_yet_is_not_what_the_name_means(registry: AdapterRegistry) -> None:
    version = registry.add("math", info())
    with pytest.raises(UnknownModelError):
        registry.find("math")
    registry.discard(version.ref)
    with pytest.raises(UnknownModelError):
        registry.find("math@1")
    assert publish(registry, "math").ref.version == 2, "numbers are never used twice"


def test_old_versions_are_forgotten_unless_somebody_needs_them(registry: AdapterRegistry) -> None:
    publish(registry, "math")
    second = publish(registry, "math")
    registry.set_route({"math@2": 1.0})
    with registry.lease("math@1"):
        for _ in range(200):
            publish(registry, "math")
        numbers = [version.ref.version for version in registry.versions()]
        assert numbers == [1, 2, *range(203 - KEPT_VERSIONS, 203)]
    assert [version.ref.version for version in registry.versions()] == [2, *range(203 - KEPT_VERSIONS, 203)]
    assert registry.needed(second)


def test_a_version_of_a_chosen_number_is_kept_until_it_is_unloaded(registry: AdapterRegistry) -> None:
    first = registry.add("math", info(), 1)
    registry.flip(first.ref)
    for _ in range(2 * KEPT_VERSIONS):
        publish(registry, "math")
    assert registry.find("math@1") is first
    with pytest.raises(UnknownModelError):
        registry.find("math@2")
    registry.unload("math@1")
    with pytest.raises(UnknownModelError):
        registry.find("math@1")


def test_one_version_can_be_unloaded_but_not_the_live_or_a_routed_one(registry: AdapterRegistry) -> None:
    for _ in range(3):
        publish(registry, "math")
    registry.unload("math@1")
    with pytest.raises(ConflictError, match="live"):
        registry.unload("math@3")
    registry.set_route({"math@2": 1.0})
    for selector in ("math@2", "math"):
        with pytest.raises(ConflictError, match="route"):
            registry.unload(selector)
    with pytest.raises(UnknownModelError):
        registry.unload("base")
    registry.set_route({"base": 1.0})
    assert len(registry.unload("math")) == 2


def test_rollback_goes_back_one_version_at_a_time(registry: AdapterRegistry) -> None:
    for _ in range(3):
        publish(registry, "math")
    assert str(registry.rollback("math", lambda _: True).ref) == "math@2"
    assert meaning(registry, "math") == "math@2"
    with pytest.raises(ConflictError, match="no file or memory"):
        registry.rollback("math", lambda _: False)
    assert str(registry.rollback("math", lambda _: True).ref) == "math@1"
    with pytest.raises(ConflictError, match="no earlier"):
        registry.rollback("math", lambda _: True)
    assert str(publish(registry, "math").ref) == "math@4"
    assert str(registry.rollback("math", lambda _: True).ref) == "math@1"
    with pytest.raises(UnknownModelError):
        registry.rollback("tone", lambda _: True)


def test_a_version_that_is_unloaded_while_it_is_staged_never_goes_live(registry: AdapterRegistry) -> None:
    publish(registry, "math")
    staged = registry.add("math", info())
    registry.unload("math")
    with pytest.raises(UnknownModelError, match="unloaded"):
        registry.flip(staged.ref)
    with pytest.raises(UnknownModelError):
        registry.find("math")
    registry.discard(staged.ref)


def test_files_that_get_new_content_supersede_what_was_read_from_them(registry: AdapterRegistry) -> None:
    first = publish(registry, "math", "/a", "1")
    other = publish(registry, "tone", "/b", "2")
    publish(registry, "the same under another name", "/a", "1")
    published = publish(registry, "policy")
    assert (first.readable, other.readable, published.readable) == (True, True, False)
    publish(registry, "math", "/a", "3")
    assert (first.readable, other.readable) == (False, True)
    registry.set_files(first, root="/ckpt/math/checkpoint-1", checkpoint="checkpoint-1")
    assert first.readable


# ---- the route ----------------------------------------------------------------------------------


def test_requests_without_a_name_are_shared_out_by_weight(registry: AdapterRegistry) -> None:
    publish(registry, "math")
    publish(registry, "math")
    assert drawn(registry) == BASE_ADAPTER
    registry.set_route({"math@1": 0.75, "math": 0.25})
    counts = Counter(str(drawn(registry)) for _ in range(4000))
    assert 2800 < counts["math@1"] < 3200
    assert counts.keys() == {"math@1", "math@2"}


def test_the_default_adapter_takes_over_from_the_base_with_its_first_version() -> None:
    registry = AdapterRegistry("policy", default_takes_over=True)
    publish(registry, "tone")
    assert drawn(registry) == BASE_ADAPTER
    first = publish(registry, "policy")
    assert drawn(registry) == first.ref
    registry.set_route({"base": 1.0})
    publish(registry, "policy")
    assert drawn(registry) == BASE_ADAPTER, "as it was told"
    other = AdapterRegistry("policy", default_takes_over=True)
    tone = publish(other, "tone")
    other.set_route({"tone": 1.0})
    publish(other, "policy")
    assert drawn(other) == tone.ref


def test_a_discarded_version_leaves_what_it_replaced_live() -> None:
    registry = AdapterRegistry("policy", default_takes_over=True)
    first = publish(registry, "policy")
    registry.discard(publish(registry, "policy").ref)
    assert drawn(registry) == registry.find("policy").ref == first.ref
    registry.discard(first.ref)
    assert drawn(registry) == BASE_ADAPTER
    with pytest.raises(UnknownModelError):
        registry.find("policy")


# ---- checkpoints --------------------------------------------------------------------------------


def test_a_restored_version_is_live_under_its_own_number(registry: AdapterRegistry) -> None:
    registry.flip(registry.restore(AdapterRef("math", 5), info("/ckpt/math")).ref)
    assert meaning(registry, "math") == "math@5"
    assert publish(registry, "math").ref.version == 6


def test_threads_may_lease_while_others_publish_and_unload(registry: AdapterRegistry) -> None:
    publish(registry, "math")
    faults: list[Exception] = []

    def lease() -> None:
        for _ in range(500):
            try:
                with registry.lease("math") as version:
                    assert registry.version(version.ref) is version
            except UnknownModelError:
                continue
            except Exception as error:  # noqa: BLE001 - told to the test below
                faults.append(error)

    threads = [threading.Thread(target=lease) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(500):
        publish(registry, "math")
        if number % 7 == 0:
            registry.unload("math")
    for thread in threads:
        thread.join()
    assert not faults
    registry.check_integrity()
    assert all(version.leases == 0 for version in registry.versions())


def test_a_split_name_is_answered_by_the_version_that_the_key_gets() -> None:
    registry = AdapterRegistry("math")
    first, second = (registry.add("math", info()).ref for _ in range(2))
    registry.flip(second)
    registry.set_route({"math": 1.0})
    registry.split("math", lambda key: first if key == "ann" else second)
    for selector in ("math", None):
        for key, meant in (("ann", first), ("bob", second), (None, second)):
            with registry.lease(selector, key) as version:
                assert version.ref == meant
    with registry.lease("math@2", "ann") as version:
        assert version.ref == second
    with pytest.raises(ConflictError, match="being compared"):
        registry.unload("math@1")
    registry.check_integrity()
    registry.split("math", None)
    with registry.lease("math", "ann") as version:
        assert version.ref == second
    registry.unload("math@1")


def test_a_number_of_an_earlier_process_is_not_used_again() -> None:
    registry = AdapterRegistry(first_version=lambda name: 5)
    with pytest.raises(ConflictError, match="has had version 4"):
        registry.add("math", info(), number=3)
    assert registry.add("math", info(), number=5).ref == AdapterRef("math", 5)


def test_a_name_that_may_begin_at_1_may_be_given_0_once() -> None:
    registry = AdapterRegistry()
    assert registry.add("math", info(), number=0).ref == AdapterRef("math", 0)
    with pytest.raises(ConflictError):
        registry.add("math", info(), number=0)
