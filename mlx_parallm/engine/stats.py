"""The engine's statistics: counters, gauges, the JSON of `/debug/state`, and a timeline of the device thread."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from pathlib import Path

import mlx.core as mx

from mlx_parallm.core.device import DeviceSchedule
from mlx_parallm.engine.disk_prefixes import DiskPrefixes
from mlx_parallm.engine.figures import NO_TIME, DeviceSeconds, EngineStats, Histogram
from mlx_parallm.engine.scheduler import RLAwareScheduler
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.errors import ConfigError
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.memory import AnyStore
from mlx_parallm.model.device import MemoryLimits

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """Totals since the engine started.

    `steps`: forward units that sampled tokens. `prefilled_tokens`: tokens computed in chunks of prompts. Tokens taken
    from another row or from the prefix cache do not count; tokens computed again after a preemption do.
    `training_units` and `device_seconds.training` include failed units of training. `drafted`, `accepted`: tokens of
    drafts that were computed, and those of them that were right, by `Source`.
    """

    steps: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    generation_tokens: int = 0
    aborted: int = 0
    failed_steps: int = 0
    training_units: int = 0
    failed_training_units: int = 0
    device_seconds: DeviceSeconds = NO_TIME
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    def add_seconds(self, **seconds: float) -> None:
        """Adds seconds of the device's time, by the fields of `DeviceSeconds`."""
        self.device_seconds = self.device_seconds.plus(DeviceSeconds(**seconds))


def snapshot(
    counters: Counters,
    scheduler: RLAwareScheduler,
    cache: LoRABatchedKVCache,
    disk: DiskPrefixes | None,
    sequences: Iterable[Sequence],
    peak: int,
    limits: MemoryLimits | None,
) -> EngineStats:
    """Reads the statistics of a running engine. Device thread only. `peak`: MLX's peak memory in bytes."""
    return EngineStats(
        alive=True,
        ready=True,
        running=len(scheduler.live),
        waiting=scheduler.waiting,
        kv_bytes_held=cache.bytes_used,
        kv_bytes_budget=cache.device.budget_bytes,
        kv_tokens_used=cache.tokens_used,
        kv_block_tokens=BLOCK_TOKENS,
        kv_blocks=cache.device.budget_bytes // cache.block_bytes,
        kv_bytes_cached=cache.bytes_cached,
        memory_bytes={str(account): held for account, held in cache.device.bytes_by_account().items()},
        prefix_cache_queries_total=cache.queries,
        prefix_cache_hits_total=cache.hits,
        external_prefix_cache_queries_total=disk.queries if disk else 0,
        external_prefix_cache_hits_total=disk.hits if disk else 0,
        preemptions_total=scheduler.preemptions,
        steps_total=counters.steps,
        prompt_tokens_total=counters.prompt_tokens,
        generation_tokens_total=counters.generation_tokens,
        draft_tokens_total=counters.drafted.total(),
        accepted_draft_tokens_total=counters.accepted.total(),
        aborted_total=counters.aborted,
        failed_steps_total=counters.failed_steps,
        schedule=scheduler.schedule,
        decode_gaps=scheduler.gap.lengths,
        training_shares=scheduler.training.contended,
        training_share=scheduler.training.last,
        device_seconds=counters.device_seconds,
        taken_at=time.monotonic(),
        paused=scheduler.paused,
        detail={
            "mlx_memory_bytes": {"active": mx.get_active_memory(), "peak": peak, "cache": mx.get_cache_memory()},
            "mlx_limit_bytes": None if limits is None else asdict(limits),
            "prefilled_tokens_total": counters.prefilled_tokens,
            "training_units_total": counters.training_units,
            "failed_training_units_total": counters.failed_training_units,
            "training_seconds_total": counters.device_seconds.training,
            "memory_budget_bytes": cache.device.budget_bytes,
            "memory_excess_bytes": cache.device.excess,
            "draft_tokens_by_source": dict(counters.drafted),
            "accepted_draft_tokens_by_source": dict(counters.accepted),
            "prefix_cache_evictions_total": cache.evictions,
            "prefix_cache_dir": disk.describe() if disk else None,
            "blocks": [{"window": group.window, **_blocks(group)} for group in cache.groups],
            "recurrent_states": None if cache.states is None else _blocks(cache.states),
            "sequences": [_describe(sequence) for sequence in sequences],
        },
    )


def _blocks(store: AnyStore) -> dict[str, int]:
    return {"used": store.allocator.used, "cached": store.allocator.cached, "free": store.allocator.free}


_TOTALS = tuple(each.name for each in fields(EngineStats) if each.name.endswith("_total"))
_GAUGES = ("running", "waiting", "kv_bytes_held", "kv_bytes_cached", "kv_tokens_used")


class StatsOfBases:
    """The statistics of all base models, as they were last read, and of those that are unloaded."""

    def __init__(self) -> None:
        self._loaded: dict[str, EngineStats] = {}
        self._gone: dict[str, EngineStats] = {}  # what each base model had counted before it was unloaded
        self._loading_s = 0.0

    def update(self, base: str, stats: EngineStats) -> None:
        """Takes new statistics of a base model."""
        self._loaded[base] = stats

    def add_load_time(self, seconds: float) -> None:
        """Adds device time that was spent on a load."""
        self._loading_s += seconds

    def unloaded(self, base: str, stats: EngineStats) -> None:
        """Keeps of a base model that is unloaded what only grows."""
        totals = {name: getattr(stats, name) for name in _TOTALS}
        gauges = {name: getattr(stats, name) for name in ("kv_bytes_budget", "decode_gaps", "device_seconds")}
        self._loaded.pop(base, None)
        self._gone[base] = self._since_start(base, EngineStats(alive=True, ready=True, **gauges, **totals))

    def total(self, paused: bool, schedule: DeviceSchedule) -> EngineStats:
        """The statistics of all base models together."""
        bases = {base: self._since_start(base, stats) for base, stats in self._loaded.items()}
        gone = {base: counted for base, counted in self._gone.items() if base not in bases}
        stats = _sum([*bases.values(), *gone.values()])
        stats = replace(stats, device_seconds=stats.device_seconds.plus(DeviceSeconds(other=self._loading_s)))
        if len(bases) == 1 and not gone:
            return stats
        details = {base: dict(one.detail) for base, one in self._loaded.items()}
        detail = {**stats.detail, "base_models": details}
        return replace(stats, paused=paused, schedule=schedule, detail=detail, bases=bases | gone)

    def _since_start(self, base: str, stats: EngineStats) -> EngineStats:
        """The statistics of a base model, with what it had counted before it was last unloaded."""
        return _sum([stats, self._gone[base]]) if base in self._gone else stats


def _sum(each: Seq[EngineStats]) -> EngineStats:
    """The statistics of several base models together; those of the first where there is nothing to add."""
    first, *others = each
    if not others:
        return first
    accounts = dict.fromkeys(account for stats in each for account in stats.memory_bytes)
    return replace(
        first,
        **{name: sum(getattr(stats, name) for stats in each) for name in (*_TOTALS, *_GAUGES)},
        memory_bytes={account: sum(stats.memory_bytes.get(account, 0) for stats in each) for account in accounts},
        decode_gaps=reduce(Histogram.plus, [stats.decode_gaps for stats in each]),
        device_seconds=reduce(DeviceSeconds.plus, [stats.device_seconds for stats in each]),
    )


def _describe(sequence: Sequence) -> dict[str, object]:
    return {
        "request_id": sequence.request.spec.request_id,
        "index": sequence.index,
        "status": sequence.status.value,
        "class": sequence.work_class.value,
        "prompt_tokens": sequence.prompt_length,
        "computed_tokens": sequence.computed,
        "generated_tokens": sequence.text.generated,
    }


# ---- the timeline ------------------------------------------------------------------------------


class UnitTrace:
    """Writes a timeline of the device thread in Chrome's trace event format: one event for each unit of device work.
    Device thread only.

    chrome://tracing and Perfetto (https://ui.perfetto.dev) open the file. They accept an array without its closing
    bracket, so the file can be opened after every unit, also while the server runs and after a crash.

    Args:
        path: the file, which is overwritten. None: nothing is recorded.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None
        if path is not None:
            try:
                self._file = path.open("w", buffering=1)  # flushed at every newline
            except OSError as error:
                raise ConfigError(f"debug.trace: {path} cannot be written: {error.strerror}") from error
            self._write("[", name="thread_name", ph="M", args={"name": "device"})

    def span(self, name: str, **numbers: int) -> AbstractContextManager[None]:
        """Records the time of a block under this name. `numbers` are shown with it."""
        return nullcontext() if self._file is None else self._recording(name, numbers)

    @contextmanager
    def _recording(self, name: str, numbers: dict[str, int]) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._write(",", name=name, ph="X", ts=started * 1e6, dur=seconds * 1e6, args=numbers)

    def close(self) -> None:
        """Closes the file. Nothing is recorded afterwards."""
        if self._file is not None:
            with suppress(OSError):  # what it has not written yet is lost
                self._file.close()
            self._file = None

    def _write(self, separator: str, **event: object) -> None:
        """Appends one event. Times are in microseconds."""
        if self._file is None:
            return
        try:
            self._file.write(f"{separator}\n{json.dumps({'pid': os.getpid(), 'tid': 1, **event})}")
        except OSError as error:  # the disk is full, which must not fail the unit
            _log.warning("debug.trace: nothing more is recorded: %s", error.strerror)
            self.close()
