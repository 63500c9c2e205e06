"""mlx-lm's batch generator and a plain trainer, on the engine's device thread while the engine is idle.

The model is loaded a second time, with the same weights in the same format. Both sides compute on the default stream,
one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.bench.ours import SETTLED
from mlx_parallm.bench.plain_trainer import PlainTrainer
from mlx_parallm.core.requests import SamplingParams
from mlx_parallm.selftest.plain import PlainModel
from mlx_parallm.train.data import Datum


class MlxLm:
    """The model at a path as mlx-lm runs it; None is the bundled one. Device thread only.

    Args:
        weights: of the adapter that its own LoRA layers use.
    """

    def __init__(self, path: str | None, weights: AdapterWeights, dtype: mx.Dtype) -> None:
        self._plain, self._weights, self._dtype = PlainModel(path), weights, dtype

    def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, adapters: int, steps: int, seconds: float
    ) -> float:
        """Tokens a second of rows that decode together: see `Ours.decode`. It has one adapter for all rows, or none."""
        with self._adapted(adapters):
            generator = self._generator(prompts, sampling, SETTLED + steps + 2)
            for _ in range(SETTLED):
                while len(generator.next()[1]) < len(prompts):
                    pass
            started, made = time.perf_counter(), 0
            while made < steps and time.perf_counter() - started < seconds:
                generator.next()
                made += 1
            rate = made * len(prompts) / (time.perf_counter() - started)
            mx.synchronize()
            return rate

    def prefill(self, prompt: Sequence[int], sampling: SamplingParams, adapters: int) -> float:
        """Prompt tokens a second, from the insertion of the prompt to its first token."""
        with self._adapted(adapters):
            started = time.perf_counter()
            generator = self._generator([prompt], sampling, 2)
            while not generator.next()[1]:
                pass
            seconds = time.perf_counter() - started
            mx.synchronize()
            return len(prompt) / seconds

    def update(self, samples: Sequence[Datum], rows: int) -> float:
        """Seconds of an update by the plain trainer, which keeps all activations of `rows` rows."""
        with self._adapted(adapters=1, dtype=mx.float32):
            trainer = PlainTrainer(self._plain.model, rows)
            started = time.perf_counter()
            trainer.update(samples)
            return time.perf_counter() - started

    def _generator(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, tokens: int) -> BatchGenerator:
        """All rows begin at the same time."""
        generator = BatchGenerator(
            self._plain.model,
            max_tokens=tokens,
            sampler=make_sampler(temp=sampling.temperature, top_p=sampling.top_p),
            prefill_batch_size=len(prompts),
            stream=mx.default_stream(mx.default_device()),
        )
        generator.close()  # gives back the wired limit, which both sides have to leave as this process has set it
        generator.insert([list(prompt) for prompt in prompts])
        return generator

    @contextmanager
    def _adapted(self, adapters: int, dtype: mx.Dtype | None = None) -> Iterator[None]:
        """Casts the adapter's factors to the activations' dtype, or to `dtype`."""
        with self._plain.adapted(self._weights if adapters else None) as layers:
            for layer in layers.values():
                layer.lora_a, layer.lora_b = (
                    factor.astype(dtype or self._dtype) for factor in (layer.lora_a, layer.lora_b)
                )
            mx.eval(self._plain.model.parameters())
            mx.synchronize()
            yield
