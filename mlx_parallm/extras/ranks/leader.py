"""Rank 0 of a model that is split over several machines: it sends each operation on its arrays to the others, and then
does the same.

    LeadingRunner   forward passes
    LeadingCache    the arrays of the KV pool
    LeadingGroup    the factors of the adapter bank
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from select import select
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from safetensors.numpy import save

from mlx_parallm.adapters.bank import AdapterBank, ModelSplit, SplitGroup
from mlx_parallm.adapters.weights import LinearSpec, LoRAPair
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.batch.spans import Span
from mlx_parallm.errors import DeviceLostError, RankLostError
from mlx_parallm.extras.ranks.joining import Peer
from mlx_parallm.extras.ranks.operations import (
    ClearGroup,
    ClearPool,
    CopyBlocks,
    FitSlots,
    ForwardPass,
    Operation,
    ReadSlot,
    ResizeArena,
    RowTokens,
    Stop,
    WriteSlot,
)
from mlx_parallm.extras.ranks.wire import encode
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.memory import AnyStore
from mlx_parallm.kv.row import KVRow
from mlx_parallm.model.cache_plan import CachePlan

_LOST_WITHIN_S = 0.5
"""A rank whose end has made a computation fail is seen to have ended within this time, in seconds."""


class Leader:
    """The ranks that repeat the operations of rank 0, with a connection to each."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = peers

    def repeat(self, operation: Operation) -> None:
        """Sends an operation. Call it before rank 0 does the same, because a forward pass needs all ranks at once.

        Raises:
            RankLostError: a rank is gone.
        """
        message = encode(operation)
        for peer in self._peers:
            try:
                peer.work.sendall(message)
            except OSError as error:
                raise RankLostError(f"rank {peer.rank} is lost: {error}; start all ranks again") from error

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block in which all ranks compute together. If it fails on one, the others wait in it, so nothing else can
        begin.

        Raises:
            RankLostError: it failed because a rank is gone.
            DeviceLostError: it failed for another reason.
        """
        try:
            yield
        except RankLostError:
            raise
        except Exception as error:
            if (lost := self._lost()) is not None:
                raise RankLostError(f"rank {lost} is lost: its connection was closed; start all ranks again") from error
            raise DeviceLostError(f"{what} on several ranks failed: {error}; start all ranks again") from error

    def _lost(self) -> int | None:
        """A rank that has ended. The others send nothing on these connections, so one that can be read was closed."""
        ranks = {peer.work: peer.rank for peer in self._peers}
        closed, _, _ = select([*ranks], [], [], _LOST_WITHIN_S)
        return ranks[closed[0]] if closed else None

    def stop(self) -> None:
        """Ends the other ranks. Does nothing for one that is gone."""
        for peer in self._peers:
            try:
                peer.work.sendall(encode(Stop()))
            except OSError:
                continue


class LeadingRunner(BatchRunner):
    """Runs forward passes together with the other ranks. A pass is computed when `run_trunk` returns, because ranks
    that wait for each other must compute the same things in the same order."""

    def __init__(
        self,
        model: nn.Module,
        cache: LoRABatchedKVCache,
        bank: AdapterBank,
        plan: CachePlan,
        followers: Leader,
    ) -> None:
        super().__init__(model, cache, bank, plan)
        self._followers = followers

    def run_trunk(self, inputs: mx.array, spans: Sequence[Span[KVRow]]) -> mx.array:
        """See `BatchRunner.run_trunk`.

        Raises:
            DeviceLostError: the pass failed. The other ranks wait in it, so no other pass can begin.
        """
        rows = [_row_tokens(span) for span in spans]
        ids: list[int] = inputs.tolist()  # type: ignore[assignment]
        self._followers.repeat(ForwardPass(ids, rows, self.attention))
        with self._followers.together("a forward pass"):
            outputs = super().run_trunk(inputs, spans)
            mx.eval(outputs, self.cache.arrays())
            self.wait()
        return outputs


def _row_tokens(span: Span[KVRow]) -> RowTokens:
    row = span.row
    return RowTokens([list(table) for table in row.tables], row.adapter_slot, span.start, span.tokens)


class LeadingCache(LoRABatchedKVCache):
    """The KV pool, whose arrays the other ranks have too, for other heads.

    Args:
        settings: those of `LoRABatchedKVCache`.
    """

    def __init__(self, followers: Leader, *settings: Any) -> None:
        self._followers = followers
        super().__init__(*settings)

    def clear(self) -> None:
        """See `LoRABatchedKVCache.clear`."""
        self._followers.repeat(ClearPool())
        super().clear()

    def resize(self, store: AnyStore, total: int, most_bytes: float = math.inf) -> bool:
        """See `KVMemory.resize`."""
        self._followers.repeat(ResizeArena(store.number, total, most_bytes))
        return super().resize(store, total, most_bytes)

    def shrink(self, store: AnyStore, most_bytes: float = math.inf) -> bool:
        """See `KVMemory.shrink`."""
        self._followers.repeat(ResizeArena(store.number, store.allocator.total, most_bytes))
        return super().shrink(store, most_bytes)

    def copy(self, store: AnyStore, sources: Sequence[int], targets: Sequence[int]) -> bool:
        """See `KVMemory.copy`."""
        self._followers.repeat(CopyBlocks(store.number, list(sources), list(targets)))
        return super().copy(store, sources, targets)


class LeadingGroup(SplitGroup):
    """A group of linears in the adapter bank, whose factors the other ranks have too."""

    def __init__(self, specs: Sequence[LinearSpec], dtype: mx.Dtype, split: ModelSplit, followers: Leader) -> None:
        super().__init__(specs, dtype, split)
        self._followers = followers
        self._name = specs[0].group

    def fit(self, slots: int, paths: Sequence[str], rank: int = 0) -> bool:
        """See `LinearGroup.fit`."""
        self._followers.repeat(FitSlots(self._name, slots, list(paths), rank))
        return super().fit(slots, paths, rank)

    def write(self, slot: int, pairs: dict[str, LoRAPair]) -> None:
        """See `LinearGroup.write`."""
        scales = {path: pair.scale for path, pair in pairs.items()}
        self._followers.repeat(WriteSlot(self._name, slot, _packed(pairs), scales))
        super().write(slot, pairs)

    def read(self, slot: int, ranks: dict[str, int]) -> dict[str, LoRAPair]:
        """See `LinearGroup.read`."""
        self._followers.repeat(ReadSlot(self._name, slot, ranks))
        return super().read(slot, ranks)

    def clear(self) -> None:
        """See `LinearGroup.clear`."""
        self._followers.repeat(ClearGroup(self._name))
        super().clear()


def _packed(pairs: dict[str, LoRAPair]) -> str:
    """Factors as safetensors, in float32. NumPy has no bfloat16."""
    arrays = {f"{path}.{name}": getattr(pair, name) for path, pair in pairs.items() for name in ("a", "b")}
    packed = save({name: np.ascontiguousarray(mx.array(array).astype(mx.float32)) for name, array in arrays.items()})
    return b64encode(packed).decode()
