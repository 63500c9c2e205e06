"""Samples answers with the engine's own forward pass, KV pool and sampling, in the calling thread."""

from __future__ import annotations

from collections.abc import Sequence

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip

from benchmarks.lib.training.in_process import Answer
from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.app.device import build_runner
from mlx_parallm.batch.sampling import RowSampling, SampledToken, plan_sampling, sample
from mlx_parallm.batch.spans import Span, in_order
from mlx_parallm.config import Setting, resolve
from mlx_parallm.core.requests import SamplingParams
from mlx_parallm.kv.row import KVRow
from mlx_parallm.model.manager import SharedModelManager


class PoolSampler:
    """Samples at temperature 1.

    Args:
        kv_bits: bits of the KV pool; None: it is not quantized.
    """

    def __init__(self, manager: SharedModelManager, bank: AdapterBank, kv_bits: int | None = None) -> None:
        keys = {"server.kv_bits": kv_bits, "server.kv_cache_memory": "1GB"}
        config = resolve({name: Setting(value, "this benchmark") for name, value in keys.items()}).config
        self._runner = build_runner(manager, bank, config)
        self._bank, self._vocabulary = bank, manager.plan.vocab_size
        self.tokenizer = manager.tokenizer
        (self._end,) = manager.tokenizer.encode("<|im_end|>")

    def publish(self, slot: int, weights: AdapterWeights) -> None:
        """Writes a version into a slot of the bank."""
        for _ in self._bank.write(slot, weights):
            pass

    def sample(self, prompts: Sequence[str], count: int, max_tokens: int, slot: int, seed: int) -> list[list[Answer]]:
        """`count` answers to each prompt, by the adapter in this slot."""
        cache, ids = self._runner.cache, [tuple(self.tokenizer.encode(prompt)) for prompt in prompts]
        rows, logits = [], []
        for each in ids:
            row = self._opened(len(each) + max_tokens, slot)
            logits.append(self._runner.last_logits([Span(row, 0, len(each))], mx.array(each, mx.uint32)))
            mx.eval(logits[-1], cache.arrays())
            row.computed = len(each)
            rows += [row, *(self._forked(row, len(each) + max_tokens) for _ in range(count - 1))]
        samples = self._decoded(rows, mx.repeat(mx.concatenate(logits), count, 0), max_tokens, seed)
        for row in rows:
            cache.close(row)
        answers = [self._answer(ids[at // count], tokens) for at, tokens in enumerate(samples)]
        return [answers[at : at + count] for at in range(0, len(answers), count)]

    def _opened(self, tokens: int, slot: int) -> KVRow:
        row = self._runner.cache.open(tokens)
        assert row is not None, "the pool is too small for the benchmark"
        row.adapter_slot = slot
        return row

    def _forked(self, source: KVRow, tokens: int) -> KVRow:
        row = self._runner.cache.fork(source, source.computed, tokens, into=KVRow(adapter_slot=source.adapter_slot))
        assert row is not None
        assert row.computed == source.computed
        return row

    def _decoded(self, rows: Sequence[KVRow], logits: mx.array, most: int, seed: int) -> list[list[SampledToken]]:
        """What each row samples, until it ends or has `most` tokens."""
        seeds = range(seed * len(rows), (seed + 1) * len(rows))
        options = [RowSampling(SamplingParams(seed=each), sampling_logprobs=True) for each in seeds]
        samples: list[list[SampledToken]] = [[] for _ in rows]
        live = list(range(len(rows)))
        while True:
            plan = plan_sampling([options[at] for at in live], self._vocabulary)
            found = sample(logits, plan, [len(samples[at]) for at in live]).read([options[at] for at in live])
            for at, token in zip(live, found, strict=True):
                samples[at].append(token)
            live = [at for at in live if samples[at][-1].token != self._end and len(samples[at]) < most]
            if not live:
                return samples
            spans = in_order([Span(rows[at], rows[at].computed, 1) for at in live])
            number = {id(rows[at]): at for at in live}
            live = [number[id(span.row)] for span in spans]
            logits = self._runner.last_logits(spans, mx.array([samples[at][-1].token for at in live], mx.uint32))
            mx.eval(logits, self._runner.cache.arrays())
            for at in live:
                rows[at].computed += 1

    def _answer(self, prompt: tuple[int, ...], samples: Sequence[SampledToken]) -> Answer:
        tokens = tuple(each.token for each in samples)
        ended = tokens[-1] == self._end
        text = self.tokenizer.decode([token for token in tokens if token != self._end])
        return Answer(prompt, tokens, tuple(each.sampling_logprob for each in samples), text, ended)
