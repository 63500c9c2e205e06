"""The parts of an engine that differ between a whole model and one that is split over several machines."""

from __future__ import annotations

from collections.abc import Callable, Collection

import mlx.nn as nn

from mlx_parallm.adapters.bank import AdapterBank, GroupMaker, LinearGroup, ModelSplit
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.device_memory import DeviceMemory
from mlx_parallm.model.cache_plan import CachePlan
from mlx_parallm.model.layer_state import KVLayout
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.train.model import Recomputes, TrainableModel


class Parts:
    """Makes the parts for a whole model.

    `split`: keeps this rank's part of a model; None if the model is whole.
    """

    split: Callable[[nn.Module], ModelSplit] | None = None

    def linear_group(self, split: ModelSplit | None) -> GroupMaker:
        """Makes the groups of linears of an adapter bank. `split`: how the model is divided."""
        return LinearGroup

    def cache(
        self, layout: KVLayout, device: DeviceMemory, max_length: int, keep_prefixes: bool, control_ids: Collection[int]
    ) -> LoRABatchedKVCache:
        """The KV pool."""
        return LoRABatchedKVCache(layout, device, max_length, keep_prefixes, control_ids)

    def runner(self, model: nn.Module, cache: LoRABatchedKVCache, bank: AdapterBank, plan: CachePlan) -> BatchRunner:
        """What runs the model; see `BatchRunner`."""
        return BatchRunner(model, cache, bank, plan)

    def trainable(
        self, manager: SharedModelManager, bank: AdapterBank, recomputes: Recomputes, segment: int
    ) -> TrainableModel:
        """The model with gradients; see `TrainableModel`."""
        return TrainableModel(manager.model, bank, manager.plan, recomputes, segment)
