"""Logprobs: those that a policy, or the base model, gives to the trained tokens of samples.

With a teacher's samples (the same answers after another prompt, or under another adapter) they are what distillation
imitates.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import cast

import mlx.core as mx

from mlx_parallm.train.data import Datum
from mlx_parallm.train.packing import SampleBatch, split_samples
from mlx_parallm.train.policy import Policy


class Logprobs:
    """A forward pass over samples, without gradients.

    Attributes:
        needs: what it cannot do without: nothing.
        policy: None is the base model.
        batches: the samples, in sample batches.
        device_seconds: the time of the units that worked on it.
        future: completed by the trainer with the logprobs of each sample's trained tokens, in nats, in the order of the
            samples; or with StepFailedError.

    Args:
        max_tokens: most tokens of a batch. A single sample may have more.
    """

    def __init__(self, policy: Policy | None, samples: Sequence[Datum], max_tokens: int) -> None:
        self.policy = policy
        self.needs: Sequence[object] = ()
        self.batches = tuple(split_samples(samples, max_tokens))
        self.device_seconds = 0.0
        self.future: Future[list[tuple[float, ...]]] = Future()
        self._samples = samples
        self._of_sample: dict[int, tuple[float, ...]] = {}

    def add(self, batch: SampleBatch, logprobs: mx.array) -> None:
        """Keeps the evaluated logprobs of one batch, fp32 [N]."""
        values = iter(cast(list[float], logprobs.tolist()))
        for sample in batch.samples:
            self._of_sample[id(sample)] = tuple(next(values) for _ in sample.trained())

    def result(self) -> list[tuple[float, ...]]:
        return self.of(self._samples)

    def of(self, samples: Sequence[Datum]) -> list[tuple[float, ...]]:
        """Those of some of the samples, once they are computed."""
        return [self._of_sample[id(sample)] for sample in samples]
