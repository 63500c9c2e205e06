"""The parts of an engine that differ between a whole model and one that is split over several machines.

LeadingParts     rank 0 of several
FollowingParts   another rank
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.bank import AdapterBank, GroupMaker, ModelSplit, SplitGroup
from mlx_parallm.app.parts import Parts
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.extras.ranks.leader import Leader, LeadingCache, LeadingGroup, LeadingRunner
from mlx_parallm.extras.ranks.tensor_parallel import split_model
from mlx_parallm.extras.ranks.training import LeadingTrainableModel
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.device_memory import DeviceMemory
from mlx_parallm.model.cache_plan import CachePlan
from mlx_parallm.model.layer_state import KVLayout
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.train.model import Recomputes, TrainableModel


class FollowingParts(Parts):
    """Makes the parts of a rank that repeats what rank 0 does."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self.split = partial(split_model, group=group)

    def linear_group(self, split: ModelSplit | None) -> GroupMaker:
        """See `Parts.linear_group`."""
        assert split is not None
        return partial(SplitGroup, split=split)


class LeadingParts(Parts):
    """Makes the parts of rank 0."""

    def __init__(self, group: mx.distributed.Group, followers: Leader) -> None:
        self.split = partial(split_model, group=group)
        self.followers = followers

    def linear_group(self, split: ModelSplit | None) -> GroupMaker:
        """See `Parts.linear_group`."""
        assert split is not None
        return partial(LeadingGroup, split=split, followers=self.followers)

    def cache(
        self, layout: KVLayout, device: DeviceMemory, max_length: int, keep_prefixes: bool, control_ids: Collection[int]
    ) -> LoRABatchedKVCache:
        """See `Parts.cache`."""
        return LeadingCache(self.followers, layout, device, max_length, keep_prefixes, control_ids)

    def runner(self, model: nn.Module, cache: LoRABatchedKVCache, bank: AdapterBank, plan: CachePlan) -> BatchRunner:
        """See `Parts.runner`."""
        return LeadingRunner(model, cache, bank, plan, self.followers)

    def trainable(
        self, manager: SharedModelManager, bank: AdapterBank, recomputes: Recomputes, segment: int
    ) -> TrainableModel:
        """See `Parts.trainable`."""
        assert manager.split is not None
        return LeadingTrainableModel(manager.model, bank, manager.plan, recomputes, manager.split, self.followers)
