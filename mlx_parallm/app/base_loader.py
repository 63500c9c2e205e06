"""DeviceLoader: loads base models onto the device thread, and unloads them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from mlx_parallm.adapters.service import has_adapter
from mlx_parallm.app.all_adapters import AllAdapters
from mlx_parallm.app.base_model import BaseModel, SharedDevice, weight_bytes
from mlx_parallm.app.base_paths import base_of_adapter, bases_of_adapter
from mlx_parallm.app.base_set import BaseSet
from mlx_parallm.app.build import RunningEngine
from mlx_parallm.app.deletion import Deletion
from mlx_parallm.app.device import room_for_weights
from mlx_parallm.app.residency import ResidentModel
from mlx_parallm.core.models import GENERIC_NAME, ServedModel
from mlx_parallm.errors import UnknownModelError
from mlx_parallm.grammar.compiler import LLCompiler


class DeviceLoader:
    """Loads and unloads base models. Every method but `owner` may raise EngineDeadError.

    Args:
        on_disk: names of the adapters in the adapter folder, by base model.
        templates: see `core.ServedModel`.
    """

    def __init__(
        self,
        bases: Sequence[BaseModel],
        shared: SharedDevice,
        on_disk: Mapping[str, tuple[str, ...]],
        templates: Mapping[str, str],
    ) -> None:
        self._templates = templates
        self._bases = {base.name: base for base in bases}
        self._processor = shared.processor
        self._on_disk = on_disk
        self._grammars: dict[str, LLCompiler] = {}

    async def weigh(self, base: str) -> int:
        """The bytes that the weights will take. Takes no memory for them. Raises ModelError."""
        model = self._bases[base]
        return await self._processor.run(lambda: weight_bytes(model.open()))

    async def load(self, base: str) -> ServedModel:
        """Loads a base model. Raises ModelError, ConfigError, or the device's error."""
        model = self._bases[base]
        await self._processor.load(model.loading())
        return self.served(base)

    async def unload(self, base: str) -> None:
        """Unloads a base model that nobody uses, and frees its memory."""
        await self._processor.unload(base)

    def served(self, base: str) -> ServedModel:
        """A base model that was loaded, as routes see it."""
        model = self._bases[base]
        if base not in self._grammars:
            self._grammars[base] = LLCompiler(model.tokenizer, model.card.vocab_size)
        names = frozenset({*model.card.names, *((GENERIC_NAME,) if model.first else ())})
        return ServedModel(model.card, model.tokenizer, self._grammars[base], names, self._templates)

    def owner(self, adapter: str) -> str | None:
        """The base model of an adapter. None if no adapter has this name."""
        return next((base for base in self._bases if self._has(base, adapter)), None)

    def _has(self, base: str, adapter: str) -> bool:
        model = self._bases[base]
        if not model.described:
            return adapter.partition("@")[0] in self.adapters_on_disk(base)
        try:
            model.adapters.find(adapter)
        except UnknownModelError:
            return False
        return True

    def adapters_on_disk(self, base: str) -> tuple[str, ...]:
        """Names of the adapters of a base model that was never loaded."""
        return self._on_disk.get(base, ())


def build_base_set(
    engine: RunningEngine, templates: Mapping[str, str], deletion: Deletion
) -> tuple[BaseSet, AllAdapters]:
    """The base models and all their adapters, for routes. The first base model is loaded. `templates`: see
    `core.ServedModel`. `deletion`: see `AllAdapters`. Blocks on the disk."""
    config, shared, first = engine.config, engine.shared, engine.bases[0]
    loader = DeviceLoader(engine.bases, shared, _adapters_by_base(config.adapters.adapter_dir, shared), templates)
    residents, now = [ResidentModel(base.name) for base in engine.bases], time.monotonic()
    is_split = shared.parts.split is not None  # the other ranks do not load again
    residents[0].loaded, residents[0].pinned = True, config.rl_training.enabled or is_split
    residents[0].loaded_at, residents[0].used_at, residents[0].load_seconds = now, now, engine.load_seconds
    residents[0].weight_bytes = first.card.weight_bytes
    room = max(room_for_weights(shared.budget, config), first.card.weight_bytes)
    idle, timeout = config.model.idle_unload, config.server.queue_timeout
    models = BaseSet(loader.served(first.name), residents, room, loader, idle, timeout)
    bases_of = partial(bases_of_adapter, bases=shared.bases)
    return models, AllAdapters(engine.bases, models, loader.owner, bases_of, deletion)


def _adapters_by_base(folder: Path | None, shared: SharedDevice) -> dict[str, tuple[str, ...]]:
    """The names of the adapters in the adapter folder, by the base model that their files name. Blocks on the disk."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(folder.iterdir()) if folder is not None else ():
        if has_adapter(path):
            base = base_of_adapter(path, shared.bases)
            found[base] = (*found.get(base, ()), path.name)
    return found
