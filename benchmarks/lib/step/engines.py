"""Whole decode steps of this engine and of mlx-lm's `BatchGenerator`, on models without weights.

Only their graphs are built, inside `gpu_graphs`, and every token is 0. Prompts are prefilled as a server does it, but
never computed. After each step, what it launched and the caches become placeholders, so that graphs do not grow.
"""

import random
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, GenerationBatch
from mlx_lm.sample_utils import make_sampler

from benchmarks.lib.step.graph import Kind, placeholder
from benchmarks.lib.step.models import RANK, SLOTS, Architecture, ShapedModel, build, plain, runner_of
from benchmarks.lib.step.stand_ins import Recorder, make_zeros
from mlx_parallm.adapters.registry import AdapterRegistry
from mlx_parallm.adapters.residency import AdapterStore
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LoRAPair, VersionInfo
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.device import DeviceSchedule
from mlx_parallm.core.requests import GenerationRequest, SamplingParams, StopParams
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.engine import Engine, EngineParts
from mlx_parallm.engine.scheduler import SchedulerConfig
from mlx_parallm.engine.text import Vocabulary

_TOP_P, _TEMPERATURE = 0.9, 1.0
_PREFILL_TOKENS = 4096
_MOST_STEPS = 2000


@dataclass(frozen=True, slots=True)
class Batch:
    """What decodes: rows of one context length, with so many different adapters in turn, greedily or with top-p.
    `kernel`: several rows attend in the kernel of `paged_attention`, which mlx-lm has not."""

    rows: int
    context: int
    adapters: int = 0
    sampled: bool = False
    kernel: bool = False

    @property
    def text(self) -> str:
        rows = f"{self.rows} {'row' if self.rows == 1 else 'rows'} at {self.context:,}"
        adapters = {0: "", 1: ", one adapter"}.get(self.adapters, f", {self.adapters} adapters")
        return rows + adapters + (", top-p 0.9" if self.sampled else "") + (", kernel" if self.kernel else "")

    def prompts(self) -> list[list[int]]:
        """Different from the first token on, so that no two share a prefix."""
        return [random.Random(row).choices(range(200), k=self.context) for row in range(self.rows)]


class Models:
    """One architecture as this server and as mlx-lm would load it."""

    def __init__(self, architecture: Architecture) -> None:
        self.ours: ShapedModel = build(architecture)
        self.plain = plain(architecture)


class Ours:
    """`Engine` with a lookahead, as on a Mac, whose rows all decode."""

    def __init__(self, models: Models, batch: Batch, recorder: Recorder) -> None:
        self._recorder, self._rows = recorder, batch.rows
        self._shaped = shaped = models.ours
        self._runner = runner_of(shaped, batch.kernel)
        self._versions: dict[str, AdapterWeights] = {}
        registry, pool = AdapterRegistry(), _Inline()
        self._store = AdapterStore(
            shaped.bank, registry, lambda version: self._versions[version.info.root], pool, SLOTS, lambda: None
        )
        scheduler = SchedulerConfig(max_rows=64, max_batched_tokens=_PREFILL_TOKENS, schedule=DeviceSchedule())
        vocabulary = Vocabulary(shaped.card.vocab_size, frozenset(), lambda prompt, visible_specials: _Silent())
        parts = EngineParts(self._runner, self._store, vocabulary, scheduler, CostModel(0.002, 1e-6, 1e-9))
        self._loop = Engine(parts, lambda events: None)
        refs = [self._published(str(number)) for number in range(batch.adapters)] or [BASE_ADAPTER]
        sampling = SamplingParams(temperature=_TEMPERATURE, top_p=_TOP_P) if batch.sampled else _GREEDY
        for row, prompt in enumerate(batch.prompts()):
            ref, stopping = refs[row % len(refs)], StopParams(_MOST_STEPS, ignore_eos=True)
            self._loop.submit(GenerationRequest(str(row), (tuple(prompt),), sampling, stopping, adapter=ref))
        for _ in _limited():
            self.step()
            live = self._loop.scheduler.live
            decode = len(live) == batch.rows and all(len(row.tokens) > row.prompt_length + 1 for row in live)
            if decode and all(store.arena.blocks == store.arena.goal for store in self._runner.cache.stores):
                break

    def step(self) -> None:
        self._loop.step()
        self.cut()

    def build(self) -> None:
        """One step, whose graph is left as it is."""
        self._loop.step()

    def left(self) -> list[mx.array]:
        return []

    def cut(self) -> None:
        self._recorder.cut()
        _cut(self._runner.cache.arrays(), Kind.KEYS_AND_VALUES)
        groups = self._shaped.bank.groups.values()
        _cut([[group.a, group.b, list(group.kept.values())] for group in groups], Kind.ADAPTERS)

    def close(self) -> None:
        for row in range(self._rows):
            self._loop.abort(str(row))
        self._loop.unload()

    def _published(self, name: str) -> AdapterRef:
        weights = _adapter(self._shaped.bank.layout)
        info = VersionInfo(weights.rank, weights.alpha, weights.targets, weights.nbytes, root=name)
        version = self._store.registry.add(name, info)
        self._versions[name] = weights
        staged = self._store.stage(version, weights)
        for _ in _limited():
            if staged.done():
                break
            self.build()
        self.cut()
        staged.result()
        self._store.registry.flip(version.ref)
        return version.ref


class MlxLm:
    """`BatchGenerator`, whose rows all decode. It has no adapters of single rows."""

    def __init__(self, models: Models, batch: Batch, recorder: Recorder) -> None:
        self._recorder = recorder
        sampler = make_sampler(temp=_TEMPERATURE, top_p=_TOP_P) if batch.sampled else None
        sizes = {"completion_batch_size": batch.rows, "prefill_batch_size": batch.rows}
        self._generator = BatchGenerator(models.plain, max_tokens=_MOST_STEPS, sampler=sampler, **sizes)
        self._generator.insert(batch.prompts())
        for _ in _limited():
            self.step()
            if len(self._batch) == batch.rows:
                break

    def step(self) -> None:
        self.build()
        self.cut()

    def build(self) -> None:
        """One step, whose graph is left as it is."""
        self._generator.next()

    def left(self) -> list[mx.array]:
        """What the step left to the next one to compute. Here, that one begins with computed offsets."""
        return self._offsets

    def cut(self) -> None:
        mx.random.seed(0)  # each step splits the key of the step before
        self._recorder.cut()
        if self._batch.uids:
            make_zeros([self._batch._next_tokens])  # those of prompts are concatenated after their launch
        make_zeros(self._offsets)
        _cut(self._caches, Kind.KEYS_AND_VALUES)

    @property
    def _batch(self) -> GenerationBatch:
        return self._generator._generation_batch

    @property
    def _caches(self) -> list[dict[str, Any]]:
        batches = (self._batch, self._generator._prompt_batch)
        return [vars(cache) for batch in batches for cache in batch.prompt_cache]

    @property
    def _offsets(self) -> list[mx.array]:
        return [array for array in _arrays(self._caches) if array.ndim == 1]

    def close(self) -> None:
        self._generator.close()


_GREEDY = SamplingParams(temperature=0.0)


class _Silent:
    """A detokenizer of tokens without text."""

    def add(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class _Inline(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _adapter(layout: AdapterLayout) -> AdapterWeights:
    pairs = {}
    for path, spec in layout.linears.items():
        a, b = (placeholder(shape, mx.float32, Kind.ADAPTERS) for shape in (spec.a_shape(RANK), spec.b_shape(RANK)))
        pairs[path] = LoRAPair(a, b, 1.0)
    return AdapterWeights(pairs)


def _arrays(trees: Any) -> list[mx.array]:
    return [array for _, array in tree_flatten(trees) if isinstance(array, mx.array)]


def _cut(trees: Any, kind: Kind) -> None:
    """Makes placeholders of the arrays of several dimensions, wherever they are held."""
    for array in _arrays(trees):
        if array.ndim > 1:
            array[...] = placeholder(array.shape, array.dtype, kind)


def _limited() -> Iterator[int]:
    """Raises RuntimeError instead of ending."""
    yield from range(_MOST_STEPS)
    raise RuntimeError(f"the rows did not decode after {_MOST_STEPS} steps")
