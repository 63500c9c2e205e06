"""Policies of Tinker's clients, with stand-ins for the device."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from lora import layout_of, random_adapter
from tiny import tiny_model

from mlx_parallm.adapters.registry import AdapterRegistry
from mlx_parallm.adapters.weights import AdapterWeights, Version, VersionInfo
from mlx_parallm.errors import UnknownModelError
from mlx_parallm.extras.tinker.records import PolicySpec
from mlx_parallm.extras.tinker.service import TinkerService


async def test_a_policy_that_is_closed_while_it_is_published_leaves_no_version_behind() -> None:
    registry, staged = AdapterRegistry(), asyncio.Event()
    layout = layout_of(tiny_model("llama"))

    class Adapters:
        async def publish(self, name: str, weights: AdapterWeights, info: VersionInfo, goes_live: bool) -> Version:
            version = registry.add(name, info)
            await staged.wait()
            return version

        discard = staticmethod(registry.discard)

    class Learner:
        async def open(self, *given: Any) -> None: ...

        async def close(self, name: str) -> None: ...

        def state(self, name: str) -> Any:
            return SimpleNamespace(step=0)

        def weights(self, name: str) -> AdapterWeights:
            return random_adapter(layout, 1)

    service = TinkerService(Learner(), Adapters(), None, registry, layout, 8, 1)  # type: ignore[arg-type]
    await service.create("tinker-a-0", PolicySpec(rank=2, alpha=4.0, seed=0))
    publishing = asyncio.create_task(service.publish("tinker-a-0"))
    await asyncio.sleep(0)
    await service.close("tinker-a-0")
    assert registry.versions(), "it is being published"
    staged.set()
    with pytest.raises(UnknownModelError):
        await publishing
    assert not registry.versions()
