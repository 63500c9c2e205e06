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
    InvalidRequestError,
    ModelNotFoundError,
    ModelUnavailableError,
    QueueTimeoutError,
)


class FakeLoader:
    """Every base model has 6 bytes. `log`: what was loaded and unloaded, in order; a load waits while `hold` is set.
    `errors`: what a load raises."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.errors: dict[str, Exception] = {}
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

    def owner(self, adapter: str) -> str | None:
        return self.adapters.get(adapter)

    def adapters_on_disk(self, base: str) -> tuple[str, ...]:
        return tuple(name for name, owner in self.adapters.items() if owner == base)


class NoGrammars:
    def compile(self, spec: object) -> object:
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


async def test_a_loaded_base_model_is_used_at_once() -> None:
    async with base_models() as (models, loader):
        assert models.is_ready("a")
        assert await use(models, "a") == "a"
        assert not loader.log


async def test_requests_that_wait_together_load_it_once() -> None:
    async with base_models(room=20) as (models, loader):
        assert await asyncio.gather(*(use(models, "b") for _ in range(5))) == ["b"] * 5
        assert loader.log == ["+b"]
        assert states(models) == {"a": "loaded", "b": "loaded", "c": "idle"}


async def test_requests_under_way_end_before_their_base_model_is_unloaded() -> None:
    async with base_models() as (models, loader):
        ends = asyncio.Event()
        first = asyncio.create_task(use(models, "a", ends))
        await settled()
        other = asyncio.create_task(use(models, "b"))
        await settled()
        late = asyncio.create_task(use(models, "a"))
        await settled()
        assert states(models) == {"a": "leaving", "b": "loading", "c": "idle"}
        assert not loader.log
        ends.set()
        assert await asyncio.gather(first, other, late) == ["a", "b", "a"]
        assert loader.log == ["-a", "+b", "-b", "+a"]


async def test_a_load_that_fails_costs_only_its_own_requests() -> None:
    async with base_models(room=20) as (models, loader):
        loader.errors["b"] = ModelNotFoundError("no model directory at /home/me/b")
        results = await asyncio.gather(use(models, "b"), use(models, "a"), use(models, "b"), return_exceptions=True)
        assert results[1] == "a"
        for error in (results[0], results[2]):
            assert isinstance(error, ModelUnavailableError)
            assert "/home/me" not in str(error)
        assert models.statuses()[1].state is ModelState.FAILED
        with pytest.raises(ModelUnavailableError):
            await use(models, "b")
        assert loader.log == ["+b"], "it is not tried again at once"


async def test_a_load_that_failed_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.app.models.RETRY_S", 0.0)
    async with base_models(room=20) as (models, loader):
        loader.errors["b"] = RuntimeError("[malloc]")
        with pytest.raises(ModelUnavailableError):
            await use(models, "b")
        del loader.errors["b"]
        assert await use(models, "b") == "b"
        assert models.statuses()[1] == BaseStatus("b", ModelState.LOADED, served("b").card)


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


async def test_a_client_that_leaves_during_the_load_leaves_it_unused() -> None:
    async with base_models(idle_unload_s=0.0, room=20) as (models, loader):
        loader.hold.clear()
        gone = asyncio.create_task(use(models, "b"))
        await settled()
        gone.cancel()
        loader.hold.set()
        await settled()
        assert "-b" in loader.log, "it counts as used by nobody"


async def test_a_request_waits_for_a_limited_time() -> None:
    async with base_models(queue_timeout_s=0.01) as (models, loader):
        loader.hold.clear()
        with pytest.raises(QueueTimeoutError):
            await use(models, "b")


async def test_an_unused_base_model_is_unloaded_by_time() -> None:
    async with base_models(idle_unload_s=0.01) as (models, loader):
        while not loader.log:
            await asyncio.sleep(0.005)
        assert loader.log == ["-a"]
        assert states(models)["a"] == "idle"
        assert await use(models, "a") == "a"
        assert loader.log[:2] == ["-a", "+a"]


async def test_a_client_that_alternates_leaves_the_others_their_turn() -> None:
    async with base_models() as (models, loader):
        resident = models._residents["a"]
        now = asyncio.get_running_loop().time()
        resident.load_seconds, resident.loaded_at, resident.used_at = 1000.0, now, now
        ends = asyncio.Event()
        steady = asyncio.create_task(use(models, "a", ends))
        await settled()
        bad = asyncio.create_task(use(models, "b"))
        await settled()
        assert await asyncio.gather(*(use(models, "a") for _ in range(9))) == ["a"] * 9
        assert not loader.log
        resident.loaded_at -= 4000.0  # its turn ends
        models._changed.set()
        await settled()
        assert states(models)["a"] == "leaving"
        ends.set()
        assert await asyncio.gather(steady, bad) == ["a", "b"]


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


async def test_names_of_different_base_models_are_refused() -> None:
    async with base_models() as (models, _):
        with pytest.raises(InvalidRequestError, match="'tone' belongs to the base model a, and 'b' to b"):
            models.find("b", "tone")
