"""Requests wait for their base model, which is loaded once for all of them; faults cost only those who asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from server.fakes import CARD, ByteTokenizer

from mlx_parallm.app.models import BaseSet, ResidentModel
from mlx_parallm.core.models import BaseStatus, ModelState, ServedModel
from mlx_parallm.errors import (
    ModelUnavailableError,
)


class FakeLoader:
    """Every base model has 6 bytes. `log`: what was loaded and unloaded, in order; a load waits while `hold` is set.
    `errors`, `unload_errors`: what a load raises, and what the next unloads raise."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.errors: dict[str, Exception] = {}
        self.unload_errors: list[Exception] = []
        self.sizes: dict[str, int] = {}
        self.adapters = {"tone": "a", "math": "b"}

    async def weigh(self, base: str) -> int:
        return self.sizes.get(base, 6)

    async def load(self, base: str) -> ServedModel:
        self.log.append(f"+{base}")
        await self.hold.wait()
        if error := self.errors.get(base):
            raise error
        return served(base)

    async def unload(self, base: str) -> None:
        self.log.append(f"-{base}")
        if self.unload_errors:
            raise self.unload_errors.pop()

    def owner(self, adapter: str) -> str | None:
        return self.adapters.get(adapter)

    def adapters_on_disk(self, base: str) -> tuple[str, ...]:
        return tuple(name for name, owner in self.adapters.items() if owner == base)


class NoGrammars:
    def compile(self, spec: object, new: bool = True) -> object:
        raise AssertionError(spec)

    def close(self) -> None:
        pass


def served(name: str) -> ServedModel:
    card = type(CARD)(name, 64, CARD.vocab_size, "none", "float32", 1, 6)
    return ServedModel(card, ByteTokenizer(), NoGrammars(), frozenset({name, "base-model"}))  # type: ignore[arg-type]


@asynccontextmanager
async def base_models(room: int = 10, **options: float) -> AsyncIterator[tuple[BaseSet, FakeLoader]]:
    """Three base models, of which `a` is loaded and one fits."""
    loader, residents = FakeLoader(), [ResidentModel(name) for name in "abc"]
    residents[0].loaded, residents[0].weight_bytes = True, 6
    models = BaseSet(served("a"), residents, room, loader, **options)  # type: ignore[arg-type]
    async with models.kept_up():
        yield models, loader


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def states(models: BaseSet) -> dict[str, str]:
    return {status.name: status.state.value for status in models.statuses()}


async def use(models: BaseSet, base: str, ends: asyncio.Event | None = None) -> str:
    async with models.use(base) as model:
        if ends is not None:
            await ends.wait()
        return model.card.name


async def test_a_load_that_failed_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.app.models.RETRY_S", 0.0)
    async with base_models(room=20) as (models, loader):
        loader.errors["b"] = RuntimeError("[malloc]")
        with pytest.raises(ModelUnavailableError):
            await use(models, "b")
        del loader.errors["b"]
        assert await use(models, "b") == "b"
        assert models.statuses()[1] == BaseStatus("b", ModelState.LOADED, served("b").card)


async def test_one_that_was_used_gives_way_when_nobody_uses_it_any_more() -> None:
    async with base_models() as (models, loader), asyncio.timeout(10):
        for base in "aabb":
            assert await use(models, base) == base
        assert loader.log == ["-a", "+b"]


@pytest.mark.parametrize("idle", [True, False])
async def test_a_fault_of_an_unload_costs_no_request(idle: bool) -> None:
    """Of an unload because nobody used it, or because it gave way."""
    options = {"room": 20, "idle_unload_s": 0.01} if idle else {"room": 10}
    async with base_models(**options) as (models, loader):
        loader.unload_errors = [RuntimeError("[metal::malloc]")]
        if idle:
            while states(models)["a"] == "loaded":
                await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            for base in "bab":
                assert await use(models, base) == base
        assert not loader.unload_errors
        assert loader.log[:2] == ["-a", "+b"]


async def test_one_that_never_fits_unloads_no_other() -> None:
    async with base_models() as (models, loader):
        loader.sizes["b"] = 11
        with pytest.raises(ModelUnavailableError, match="--kv-cache-memory"):
            await use(models, "b")
        assert not loader.log
        assert await use(models, "a") == "a"


async def test_a_client_that_leaves_waits_no_longer() -> None:
    async with base_models() as (models, loader):
        ends = asyncio.Event()
        first = asyncio.create_task(use(models, "a", ends))
        await settled()
        gone = asyncio.create_task(use(models, "b"))
        await settled()
        gone.cancel()
        await settled()
        assert states(models)["a"] == "loaded", "nobody waits for b any more"
        assert await use(models, "a") == "a"
        ends.set()
        await first
        assert not loader.log


@pytest.mark.parametrize(
    ("names", "base"),
    [
        ((None, None), "a"),
        (("base", None), "a"),
        (("base-model",), "a"),
        (("b", None), "b"),
        (("math", "math"), "b"),
        ((None, "math"), "b"),
        (("b", "math"), "b"),
        (("b", "base"), "b"),
        (("unknown",), "a"),
    ],
)
async def test_the_base_model_that_names_mean(names: tuple[str | None, ...], base: str) -> None:
    async with base_models() as (models, _):
        assert models.find(*names) == base
