"""PoolMemory gives sequences rows of the KV pool, with what is computed already, within `DeviceMemory`."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import NamedTuple

import mlx.core as mx

from mlx_parallm.adapters.residency import AdapterStore
from mlx_parallm.adapters.weights import Version
from mlx_parallm.core.device import TrainingWork
from mlx_parallm.engine.draft_model import DraftModel
from mlx_parallm.engine.faults import Affecting
from mlx_parallm.engine.scheduler import gives_way
from mlx_parallm.engine.sequence import Sequence, SequenceStatus
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.device_memory import MemoryAccount
from mlx_parallm.kv.row import KVRow
from mlx_parallm.model.device import on_cpu

_QUIET_S, _QUIET_WITH_CACHE_S = 10.0, 60.0
"""After so many seconds without a new row, running rows keep few free blocks beside them. An arena with cached prefixes
waits longer, because it copies them when it shrinks."""

_PAUSE_S = 0.03
"""For so long after the last row has ended, arenas are not resized unless that is urgent. A client that waits for an
answer before it asks again often asks at once, and would wait for the copying."""

_TIDY_EVERY_S = 1.0
"""So often, memory is looked after although no row takes or gives back a block."""

_TIDY_SHARE = 0.1
"""Share of the time that tidying may take while rows wait for it, unless it is urgent. A large arena on a CPU copies
for seconds, and prompts would get nothing of the time between two steps meanwhile."""

_TIDY_BYTES, _TIDY_BYTES_ON_CPU = 512 << 20, 16 << 20
"""Bytes that `tidy` copies between two units, in each layer group; but at least one layer. On a CPU that takes about
20 ms, and longer for a layer that is larger."""


class PrefixRoot(NamedTuple):
    """Rows share cached prefixes if they use the same version of the same adapter, and the same salt."""

    version: Version
    salt: str


class PoolMemory:
    """The KV pool and the adapter bank, as the scheduler sees them: rows within a byte budget.

    A new row starts with keys and values that were computed before, if there are any: those of the prompt, from the row
    of a running member of its group, or those of the longest prefix in the prefix cache. At least one token of a row is
    always left to compute, because the next token is sampled from its logits. A row pins its adapter's slot as long
    as it is in the pool. A fault while a row is made or grows fails that row's request only.

    Attributes:
        ready: whether rows of an adapter may be admitted now. If the adapter is not in the bank, staging is requested.
        changed: blocks were taken or given back since `tidy` was last called, or others hold more or less memory now;
            or it has left more to do.
        gives_way: cached prefixes are giving memory to adapters or training.
    """

    def __init__(
        self,
        cache: LoRABatchedKVCache,
        adapters: AdapterStore,
        training: TrainingWork | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        cache.device.open_account(MemoryAccount.ADAPTERS, lambda: adapters.bytes_held)
        if training is not None:
            cache.device.open_account(MemoryAccount.OPTIMIZER, lambda: training.bytes_held)
            cache.device.open_account(MemoryAccount.MICRO_STEP, lambda: training.bytes_of_updates)
        self.ready = adapters.ready
        self.changed = self.gives_way = False
        self._tidied_at = 0.0
        self._draft_model = draft_model
        self._cache = cache
        self._adapters = adapters
        self._tidy_bytes = _TIDY_BYTES_ON_CPU if on_cpu() else _TIDY_BYTES
        self._rows_have_ended = False  # since the arenas were last as small as they can be
        self._opened_at = self._ended_at = 0.0
        self._due_at = 0.0  # when rows may wait for tidying again
        self._preempted_needlessly = False  # although it was enough to evict cached prefixes

    def cached(self, sequence: Sequence) -> int:
        """How many tokens of a waiting sequence would be computed already if its row was opened now. It ranks the
        sequence in the queue, and need not be exact."""
        shared = sequence.prompt_length - 1 if self._source(sequence) is not None else 0
        return max(shared, self._found(sequence))

    def open(self, sequence: Sequence) -> bool:
        """Opens a row with room for all tokens of the sequence, and sets `computed` to how many of them it starts with:
        the prompt of another row of its group, or what the prefix cache has of its tokens. Returns False when the
        budget is spent."""
        source = self._source(sequence)
        with Affecting([sequence.request]):
            if source is not None and sequence.prompt_length - 1 >= self._found(sequence):
                opened = self._cache.fork(source, sequence.prompt_length - 1, sequence.length, into=sequence)
            else:
                opened = self._open_with_prefix(sequence)
            if opened is None:
                return False
            try:
                sequence.adapter_slot = self._adapters.pin(sequence.adapter)
            except Exception:
                self._cache.remove(sequence)  # it waits still, and what waits has computed nothing
                raise
        self._opened_at = time.monotonic()
        self.changed = True
        return True

    def _open_with_prefix(self, sequence: Sequence) -> KVRow | None:
        """Opens a row with what the prefix cache has. Each prompt counts in the statistics once, however many sequences
        it has and however often they are computed again. Prompts that are scored from their start do not count."""
        request, prompt = sequence.request, sequence.index // sequence.request.spec.n
        from_start = request.spec.prompt_logprobs is not None and request.spec.scored_from <= 1
        sequence.counts_lookup = prompt not in request.looked_up and not from_start
        root, ids, counts = self._root(sequence), sequence.prefix_ids, sequence.counts_lookup
        opened = self._cache.open(sequence.length, root, ids, into=sequence, counts=counts)
        if opened is not None and sequence.counts_lookup:
            request.looked_up.add(prompt)
            request.cached_tokens += opened.computed
        return opened

    def share(self, sequence: Sequence) -> Hashable:
        """Gives a prompt in prefill what other rows have computed of it since, and raises `computed` by that.

        Returns:
            A key that prompts have in common if they compute the same block next; None if no other prompt can have it.
        """
        before = sequence.computed
        with Affecting([sequence.request]):
            counts = sequence.counts_lookup and sequence.sampled == 0
            key = self._cache.take_over(sequence, self._root(sequence), sequence.prefix_ids, counts=counts)
        if counts:
            sequence.request.cached_tokens += sequence.computed - before
        return key

    def extend(self, sequence: Sequence, tokens: int) -> bool:
        """Makes room for `tokens` tokens in the row, counted from its start. Returns False when the budget is spent."""
        if tokens <= len(sequence.tables[0]) * BLOCK_TOKENS:
            return True
        self.changed = True
        with Affecting([sequence.request]):
            return self._cache.extend(sequence, tokens)

    def extend_by_draft(self, sequence: Sequence) -> bool:
        """Makes room for the next token and the draft after it. Returns False when the budget is spent."""
        return self.extend(sequence, sequence.length + sequence.drafted) and self._cache.keep_before_draft(sequence)

    def to_preempt(self, rows: list[Sequence], growing: Sequence) -> Sequence:
        """The row that gives way when `extend` found no room for all tokens of `growing`. `rows`: all live rows in
        order of admission."""
        missing = self._cache.missing(growing, growing.length)
        self._preempted_needlessly |= missing <= 0 and not self._cache.device_refused
        return gives_way(rows)

    def close(self, sequence: Sequence) -> None:
        """Takes the row away, and sets `computed` to 0. If this raises, only the pool still has the row, until the pool
        is cleared."""
        try:
            self._cache.close(sequence, self._root(sequence), sequence.tokens)
        finally:
            sequence.computed = sequence.kept_blocks = 0
            self.changed = True
            self._adapters.unpin(sequence.adapter)
            self._rows_have_ended = True
            self._ended_at = time.monotonic()

    @property
    def is_untidy(self) -> bool:
        """Whether memory may have to be given back, or made ready for the next rows. Decode steps in between which take
        no block need not ask."""
        return self.changed or time.monotonic() - self._tidied_at > _TIDY_EVERY_S

    def tidy(self, others_wait: bool = False) -> bool:
        """Makes room for the next rows, and gives memory back to the device: what ended rows have left, what adapters
        and training need, and that of prefixes of versions that nothing can ask for any more. Call it between units.

        Args:
            others_wait: only what is urgent is done now: rows have just waited for training, and should not wait for
                copies of arenas as well. A version that is to go live does not wait for them either.

        Returns:
            Whether there is more to do: memory to give back, or training that has waited for it.
        """
        now, waited = time.monotonic(), self.gives_way
        left = self._tidy_pool(now, others_wait or self._adapters.urgent)
        if self._draft_model is not None and self._draft_model.tidy():
            left = True
        self.gives_way = left and self._cache.device.excess > 0
        self.changed, self._tidied_at = left, now
        return left or waited

    def _tidy_pool(self, now: float, others_wait: bool) -> bool:
        self._drop_unreachable()
        short = not self._cache.device.keeps_prefixes
        if short and self._cache.bytes_cached:
            self._rows_have_ended = True  # once they are dropped, MLX's freed buffers are given back too
        quiet = now - self._opened_at > (_QUIET_WITH_CACHE_S if self._cache.bytes_cached else _QUIET_S)
        due_at = self._due_at if self._cache.bytes_used else self._ended_at + _PAUSE_S
        pausing = others_wait or now < due_at
        left = self._cache.tidy(self._tidy_bytes, quiet, pausing)
        if not pausing:
            ended = time.monotonic()
            self._due_at = ended + (ended - now) / _TIDY_SHARE
        if self._rows_have_ended and (quiet or short) and not left and not pausing:
            mx.clear_cache()
            self._rows_have_ended = False
        return left

    def give_back(self) -> None:
        """Gives all memory back to the device that neither rows nor cached prefixes need. The next rows allocate it
        again."""
        while self._cache.tidy(self._tidy_bytes, quiet=True):
            pass
        mx.clear_cache()

    def reserve_checkpoint(self, sequence: Sequence, computed: int) -> None:
        """Lets the next unit keep the row's recurrent state after `computed` tokens, if it is of use to later rows."""
        with Affecting([sequence.request]):
            self._cache.reserve_checkpoint(sequence, computed)

    def keep(self, sequence: Sequence) -> None:
        """Registers the full blocks of a row in the prefix cache, and gives back those below its sliding windows, when
        there are more full blocks than the last time."""
        blocks = min(sequence.computed, len(sequence.tokens)) // BLOCK_TOKENS
        if blocks == sequence.kept_blocks:
            return
        sequence.kept_blocks = blocks
        self._cache.freeze(sequence, self._root(sequence), sequence.tokens)
        self._cache.release_windows(sequence)

    def prefix_root(self, sequence: Sequence) -> PrefixRoot | None:
        """Where blocks of a waiting sequence's prompt may be registered. None if its version is forgotten and in no
        slot, and so has no prefixes."""
        version = self._adapters.version(sequence.adapter)
        return None if version is None else PrefixRoot(version, sequence.request.spec.cache_salt)

    def check_integrity(self) -> None:
        """Raises AssertionError if the KV pool is inconsistent, or if a row gave way before all cached prefixes."""
        self._cache.check_integrity()
        self._cache.device.check_integrity()
        assert not self._preempted_needlessly, "cached prefixes were enough"

    def _drop_unreachable(self) -> None:
        """Ends the chains of adapter versions that nothing can ask for any more, and that no row uses."""
        for root in self._cache.index.roots():
            if isinstance(root, PrefixRoot) and self._adapters.unreachable(root.version):
                self._cache.index.drop(root)
                self._rows_have_ended = True

    def _source(self, sequence: Sequence) -> Sequence | None:
        """A row that has computed the prompt of this sequence's group, and still holds it. None for a sequence that has
        to compute some of it itself."""
        if sequence.scored:
            return None
        length = sequence.prompt_length - 1
        members = (member for member in sequence.group.members if member.status is SequenceStatus.RUNNING)
        return next((m for m in members if m is not sequence and self._cache.holds(m, length)), None)

    def _found(self, sequence: Sequence) -> int:
        """How many tokens of a waiting sequence its row can get from the prefix cache."""
        root = self.prefix_root(sequence)
        return 0 if root is None else self._cache.cached(root, sequence.prefix_ids)

    def _root(self, sequence: Sequence) -> PrefixRoot:
        root = self.prefix_root(sequence)
        assert root is not None, "a row's version is in a slot, or the base model"
        return root
