"""The scheduler's view of the KV pool and the adapter slots: sequences in, rows out."""

from __future__ import annotations

from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.batch.kv_cache import LoRABatchedKVCache
from mlx_parallm.batch.runner import Row
from mlx_parallm.batch.slab import KVRow
from mlx_parallm.core import AdapterRef
from mlx_parallm.engine.blame import Blame
from mlx_parallm.engine.live import LiveSequence
from mlx_parallm.scheduler.sequence import Sequence


class PoolMemory:
    """Implements `scheduler.RowMemory`. `lives` maps sequence ids to live sequences.

    A row pins its adapter's slot for as long as it is in the pool. A fault while a row is made or grows costs that
    row's request.
    """

    def __init__(
        self, cache: LoRABatchedKVCache, adapters: AdapterStore, lives: dict[int, LiveSequence], blame: Blame
    ) -> None:
        self._cache = cache
        self._adapters = adapters
        self._lives = lives
        self._blame = blame

    def ready(self, adapter: AdapterRef) -> bool:
        return self._adapters.ready(adapter)

    def allocate(self, sequence: Sequence, source: Sequence | None) -> int | None:
        """A row for all of the sequence's tokens. Its last token, not computed yet, is decode's next input."""
        live = self._lives[sequence.sequence_id]
        with self._blame.on([live.request]):
            kv = self._kv(sequence, self._row(source).kv if source else None)
        if kv is None:
            return None
        kv.adapter_slot = self._adapters.pin(sequence.adapter)
        live.row = Row(kv, live.sampling, input_token=sequence.tokens[-1], drawn=sequence.drawn)
        return kv.length

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        kv = self._row(sequence).kv
        if tokens <= kv.capacity:
            return True
        with self._blame.on([self._lives[sequence.sequence_id].request]):
            return self._cache.grow(kv, tokens)

    def free(self, sequence: Sequence) -> None:
        self._cache.free(self._row(sequence).kv)
        self._adapters.unpin(sequence.adapter)
        self._lives[sequence.sequence_id].row = None

    def _kv(self, sequence: Sequence, source: KVRow | None) -> KVRow | None:
        if source is None:
            return self._cache.allocate(sequence.length)
        return self._cache.fork(source, sequence.prompt_length - 1, sequence.length)

    def _row(self, sequence: Sequence) -> Row:
        row = self._lives[sequence.sequence_id].row
        assert row is not None, f"sequence {sequence.sequence_id} has no row"
        return row
