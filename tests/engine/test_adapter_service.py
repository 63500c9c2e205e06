"""The asyncio face of the adapters over a real device thread: load, unload, route, roll back, save."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from harness import Inline, engine_parts, greedy, make_harness, running, solo, tokens_in
from lora import layout_of, merged, random_adapter
from tiny import tiny_model

from mlx_parallm.adapters.cards import Residence
from mlx_parallm.adapters.checkpoints import CheckpointStore
from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.adapters.registry import KEPT_VERSIONS, AdapterRegistry
from mlx_parallm.adapters.residency import AdapterStore
from mlx_parallm.adapters.service import AdapterLibrary, AdapterService
from mlx_parallm.adapters.weights import AdapterWeights, VersionInfo
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.engine.engine import EngineParts
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.errors import (
    AdapterFileError,
    ConflictError,
    InvalidRequestError,
    UnknownModelError,
)

LAYOUT = layout_of(tiny_model("llama"))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@dataclass
class World:
    """A running engine and its adapters; `root` is the folder that adapters may be loaded from."""

    processor: ContinuousBatchProcessor
    service: AdapterService
    store: AdapterStore
    registry: AdapterRegistry
    root: Path
    requests: int = 0
    known: list[AdapterRef] = field(default_factory=list)

    def write(self, folder: str, seed: int) -> AdapterWeights:
        weights = random_adapter(LAYOUT, seed)
        (self.root / folder).mkdir(exist_ok=True)
        write_mlx_lm(self.root / folder, weights, LAYOUT)
        return weights

    async def generate(self, selector: str | None, max_tokens: int = 12) -> tuple[AdapterRef, list[int]]:
        self.requests += 1
        with self.service.lease(selector) as ref:
            request = greedy(str(self.requests), PROMPT, max_tokens, adapter=ref)
            return ref, tokens_in([event async for event in self.processor.generate(request)])


def expected(weights: AdapterWeights, max_tokens: int = 12) -> list[int]:
    return solo(merged(tiny_model("llama"), weights), PROMPT, max_tokens).tokens


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    root = tmp_path / "adapters"
    root.mkdir()
    checkpoints = CheckpointStore(tmp_path / "checkpoints", LAYOUT, "the base", max_rank=8, keep=3)
    library = AdapterLibrary(LAYOUT, 8, root, (), checkpoints)
    registry = AdapterRegistry("policy", library.find_checkpoint, library.first_version)
    made: list[AdapterStore] = []

    def build() -> EngineParts:
        harness = make_harness(slots=2)
        made.append(
            AdapterStore(harness.adapters.bank, registry, library.read_again, Inline(), 4, lambda: processor.wake())
        )
        return engine_parts(harness, adapters=made[0])

    async with running(build) as processor:
        service = AdapterService(processor, made[0], library, frozenset({"tiny"}), root / "live")
        yield World(processor, service, made[0], registry, root)


async def test_a_loaded_adapter_is_staged_live_and_serves(world: World) -> None:
    weights = world.write("m", 1)
    card = await world.service.load("math", "m", replace=False)
    assert (str(card.ref), card.live, card.residence, card.rank, card.alpha) == ("math@1", True, Residence.SLOT, 4, 8.0)
    assert card.root == str((world.root / "m").resolve())
    assert await world.generate("math") == (card.ref, expected(weights))
    stats = world.service.stats()
    assert (stats.staged_total, stats.stage_s_last > 0) == (1, True)


async def test_a_card_counts_requests_and_not_who_else_keeps_the_version(world: World) -> None:
    """Training leases its best version, for example, and rollouts are requests like those of clients."""

    def under_way() -> list[int]:
        return [card.leases for card in world.service.cards()]

    world.write("m", 1)
    await world.service.load("math", "m", replace=False)
    with world.service.lease("math") as ref:
        assert under_way() == [0]
        request = greedy("r", PROMPT, 40, adapter=ref)
        async with aclosing(world.processor.generate(request)) as events:
            await anext(events)
            assert under_way() == [1]
            async for _ in events:
                pass
        assert under_way() == [0]


async def test_the_same_name_again_needs_leave_and_other_content(world: World) -> None:
    world.write("m", 1)
    await world.service.load("math", "m", replace=False)
    with pytest.raises(InvalidRequestError, match="load_inplace"):
        await world.service.load("math", "m", replace=False)
    assert str((await world.service.load("math", "m", replace=True)).ref) == "math@1", "nothing changed"
    weights = world.write("m", 2)
    card = await world.service.load("math", "m", replace=True)
    assert str(card.ref) == "math@2"
    assert await world.generate("math") == (card.ref, expected(weights))


async def test_a_neutral_adapter_changes_nothing_and_names_the_linears_it_is_for(world: World) -> None:
    await world.service.write_neutral(world.root / "fresh", "mlx-lm", 4, ["q_proj", "v_proj"])
    card = await world.service.load("fresh", "fresh", replace=False)
    assert (card.rank, card.targets) == (4, ("q_proj", "v_proj"))
    ref, tokens = await world.generate("fresh")
    assert (str(ref), tokens) == ("fresh@1", solo(tiny_model("llama"), PROMPT, 12).tokens)


async def test_a_folder_of_the_programs_own_is_published_again_only_if_its_content_changes(
    world: World, tmp_path: Path
) -> None:
    """It may lie anywhere, and go afterwards."""
    folder = tmp_path / "elsewhere"
    for seed, number in ((1, 1), (1, 1), (2, 2)):
        folder.mkdir()
        weights = random_adapter(LAYOUT, seed)
        write_mlx_lm(folder, weights, LAYOUT)
        assert await world.service.publish_folder("math", folder) == AdapterRef("math", number)
        shutil.rmtree(folder)
        assert await world.generate("math") == (AdapterRef("math", number), expected(weights))


async def test_a_step_that_is_named_is_the_number_of_the_version(world: World) -> None:
    first, second = world.write("m", 1), world.write("n", 2)
    assert str((await world.service.load("math@0", "m", replace=True)).ref) == "math@0"
    assert str((await world.service.load("math@7", "n", replace=True)).ref) == "math@7"
    assert await world.generate("math@0") == (AdapterRef("math", 0), expected(first))
    assert await world.generate("math") == (AdapterRef("math", 7), expected(second))
    again = await world.service.load("math@0", "m", replace=True)
    assert (str(again.ref), again.live) == ("math@0", True)
    assert await world.generate("math") == (AdapterRef("math", 0), expected(first))
    with pytest.raises(InvalidRequestError, match="'math@7' is loaded already; load_inplace true"):
        await world.service.load("math@7", "n", replace=False)
    for taken in ("math@0", "math@3", "math@7"):
        with pytest.raises(ConflictError, match="load math@8 or a later one"):
            await world.service.load(taken, "n" if taken == "math@0" else "m", replace=True)
    assert [str(card.ref) for card in world.service.cards()] == ["math@0", "math@7"]


@pytest.mark.parametrize(
    "name",
    [
        "math@",
        "math@x",
        "math@-1",
        "math@1@2",
        "math@9999999999",
        "@1",
        "base@1",
        "tiny@1",
        "tiny",
        "base",
        "a/b",
        "latest",
        "../m",
        "",
        "route",
    ],
)
async def test_what_is_no_plain_name_or_means_something_else_is_refused(world: World, name: str) -> None:
    world.write("m", 1)
    with pytest.raises(InvalidRequestError, match="lora_name"):
        await world.service.load(name, "m", replace=True)
    assert world.service.cards() == ()


async def test_a_folder_is_loaded_by_the_first_request_that_names_it(world: World) -> None:
    weights = world.write("m", 1)
    names = await asyncio.gather(*(world.service.load_folder(path) for path in ("m", "./m", str(world.root / "m"))))
    (name,) = set(names)
    assert [str(card.ref) for card in world.service.cards()] == [f"{name}@1"]
    assert await world.generate(name) == (AdapterRef(name, 1), expected(weights))
    assert await world.service.load_folder("m") == name
    assert [await world.service.loaded_folder(path) for path in ("./m", "nowhere", "..")] == [name, None, None]
    assert world.service.stats().staged_total == 1, "files that nobody has changed are not read again"


async def test_a_folder_whose_files_were_written_again_is_loaded_again(world: World) -> None:
    """As a trainer does that saves each step into the same folder."""
    world.write("m", 1)
    name = await world.service.load_folder("m")
    weights = world.write("m", 2)
    assert await world.service.load_folder("m") == name
    assert await world.generate(name) == (AdapterRef(name, 2), expected(weights))
    world.write("m", 2)
    assert await world.service.load_folder("m") == name
    assert world.service.live(name) == AdapterRef(name, 2), "the same content is no new version"
    (world.root / "m" / "adapter_config.json").write_text("{")
    with pytest.raises(InvalidRequestError):
        await world.service.load_folder("m")


async def test_the_served_folder_may_be_filled_later_and_written_again(world: World) -> None:
    assert await world.service.default_name() is None
    (world.root / "live").mkdir()
    assert await world.service.default_name() is None, "the files come one after the other"
    first = world.write("live", 1)
    assert (name := await world.service.default_name()) is not None
    assert await world.generate(name) == (AdapterRef(name, 1), expected(first))
    second = world.write("live", 2)
    assert await world.service.default_name() == name
    assert await world.generate(name) == (AdapterRef(name, 2), expected(second))


async def test_a_folder_that_was_loaded_under_a_name_keeps_it(world: World) -> None:
    world.write("m", 1)
    world.write("other", 2)
    await world.service.load("math", "m", replace=False)
    assert await world.service.load_folder("m") == "math"
    await world.service.load("math", "other", replace=True)
    name = await world.service.load_folder("m")
    assert name not in ("math", "m"), "math now means the other folder"
    assert await world.service.load_folder("other") == "math"


async def test_a_folder_outside_the_roots_or_without_an_adapter_is_refused(world: World, tmp_path: Path) -> None:
    (world.root / "empty").mkdir()
    for path in (str(tmp_path), "../", "nowhere", "empty"):
        with pytest.raises(InvalidRequestError):
            await world.service.load_folder(path)
    assert world.service.cards() == ()


async def test_bad_files_change_nothing(world: World) -> None:
    world.write("m", 1)
    await world.service.load("math", "m", replace=False)
    before = world.service.cards()
    (world.root / "m" / "adapters.safetensors").write_bytes(b"no")
    with pytest.raises(AdapterFileError):
        await world.service.load("math", "m", replace=True)
    with pytest.raises(InvalidRequestError):
        await world.service.load("tone", "../elsewhere", replace=True)
    assert world.service.cards() == before


async def test_a_rollback_serves_the_earlier_version_even_from_memory(world: World) -> None:
    """Its files hold the newer weights by now."""
    first = world.write("m", 1)
    await world.service.load("math", "m", replace=False)
    world.write("m", 2)
    await world.service.load("math", "m", replace=True)
    ref, _ = await world.service.rollback("math")
    assert str(ref) == "math@1"
    assert await world.generate("math") == (ref, expected(first))
    with pytest.raises(ConflictError):
        await world.service.rollback("math")


async def test_routes_are_staged_before_they_lead_anywhere(world: World) -> None:
    world.write("m", 1)
    weights = world.write("t", 2)
    for name in "mt":
        await world.service.load(name, name, replace=False)
    assert (await world.generate(None))[0].name == "base"
    assert await world.service.set_route({"t": 3, "base": 1, "m": 0}) == {"t": 0.75, "base": 0.25}
    assert await world.service.set_route({"t": 2.0}) == {"t": 1.0}
    assert await world.generate(None) == (AdapterRef("t", 1), expected(weights))
    with pytest.raises(ConflictError):
        await world.service.unload("t")
    for weights, error in (
        ({"nobody": 1.0}, UnknownModelError),
        ({"t": 0}, InvalidRequestError),
        ({}, InvalidRequestError),
    ):
        with pytest.raises(error):
            await world.service.set_route(weights)
    assert (await world.service.rollback(None))[0] == AdapterRef("t", 1)
    await world.service.set_route({"base": 1.0})
    assert await world.service.unload("t") == (AdapterRef("t", 1),)


async def test_saved_versions_come_back_by_step_tag_and_latest(world: World) -> None:
    first, second = world.write("p", 1), world.write("p2", 2)
    await world.service.load("policy", "p", replace=False)
    card = await world.service.save_checkpoint(None, 100, ["best"], {"reward": 0.5})
    assert (card.name, str(card.adapter), card.tags, card.rank) == ("checkpoint-100", "policy@1", ("best", "latest"), 4)
    await world.service.load("policy", "p2", replace=True)
    await world.service.save_checkpoint("policy", None, [], {})
    assert [card.name for card in world.service.checkpoints()] == ["checkpoint-100", "checkpoint-101"]
    for selector, weights in (("checkpoint-100", first), ("best", first), ("latest", second), ("policy", second)):
        assert (await world.generate(selector))[1] == expected(weights)
    assert world.service.stats().checkpoint_saves_total == 2


async def test_what_was_published_in_this_process_is_saved_as_it_was(world: World) -> None:
    """Out of the bank, its scale and rank as published; from then on it can be read again."""
    weights = random_adapter(LAYOUT, 5, rank=3, scale=4.0)
    info = VersionInfo(weights.rank, weights.alpha, weights.targets, weights.nbytes)
    version = await world.service.publish("policy", weights, info)
    assert not version.readable
    await world.service.save_checkpoint(None, 7, [], {})
    assert version.readable
    again = CheckpointStore(world.root.parent / "checkpoints", LAYOUT, "the base", 8).load_checkpoint("policy")
    for path, pair in weights.pairs.items():
        assert np.array_equal(again.weights.pairs[path].a, pair.a)
        assert np.array_equal(again.weights.pairs[path].b, pair.b)
        assert again.weights.pairs[path].scale == 4.0


async def learnt(world: World, weights: AdapterWeights) -> AdapterRef:
    """Publishes weights from the device thread. The version's name is appended to `known`."""
    info, add = VersionInfo.of(weights), world.known.append
    return await world.processor.run(lambda: world.service.publish_trained("policy", weights, info, add))


async def test_a_version_goes_live_from_the_device_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, known_at_flip, flip = random_adapter(LAYOUT, 5), [], world.registry.flip

    def watched(ref: AdapterRef) -> None:
        known_at_flip.extend(world.known)
        flip(ref)

    monkeypatch.setattr(world.registry, "flip", watched)
    ref = await learnt(world, weights)
    assert ref == world.registry.live("policy").ref == AdapterRef("policy", 1)
    assert known_at_flip == [ref], "its name is known before it is live"
    assert world.service.find("policy").residence is Residence.SLOT
    assert await world.generate("policy") == (ref, expected(weights))


async def test_a_held_version_stays_until_it_is_released(world: World) -> None:
    """However many versions come after it, and though its folder is gone."""
    weights = {number: world.write(f"v{number}", number) for number in range(1, KEPT_VERSIONS + 4)}
    await world.service.hold(AdapterRef("math", 1), world.root / "v1")
    for number in range(2, KEPT_VERSIONS + 4):
        await world.service.publish("math", weights[number], VersionInfo.of(weights[number]))
    shutil.rmtree(world.root / "v1")
    assert (await world.generate("math@1"))[1] == expected(weights[1])
    world.service.release(AdapterRef("math", 1))
    with pytest.raises(UnknownModelError):
        await world.generate("math@1")
