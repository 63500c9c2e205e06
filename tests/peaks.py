"""How much memory a micro-step takes, beside what is expected."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.app.training import footprint_of
from mlx_parallm.config import ModelConfig, RLTrainingConfig
from mlx_parallm.model.cache_plan import CachePlan, prepare
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters
from mlx_parallm.train.data import Datum, UpdateBatch, answered
from mlx_parallm.train.footprint import Footprint
from mlx_parallm.train.model import TrainableModel
from mlx_parallm.train.policy import Policy
from mlx_parallm.train.trainer import GRPOTrainer

RANK = 16


class Group(NamedTuple):
    """Samples that share their prompt: how many, tokens of the prompt, and of each answer."""

    rows: int
    prompt: int
    answer: int

    @property
    def tokens(self) -> int:
        """Those that are computed."""
        return self.prompt + self.rows * self.answer

    def samples(self, vocabulary: int) -> Iterator[Datum]:
        """Random ones."""
        rng = random.Random(0)
        shared = [rng.randrange(1, vocabulary) for _ in range(self.prompt)]
        for row in range(self.rows):
            answer = [rng.randrange(1, vocabulary) for _ in range(self.answer)]
            yield answered(shared, answer, advantage=1.0 - 2.0 * (row % 2))


GROUPS = (Group(8, 64, 32), Group(1, 512, 512))


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that a micro-step takes, with its gradients. `checkpointed`: layers are computed again."""

    group: Group
    checkpointed: bool
    measured: int
    expected: int


class Trained:
    """A model with a bank, ready to be trained with all of its linears."""

    def __init__(self, model: nn.Module, compatible: bool = False) -> None:
        layout = adapter_layout(model)
        self.plan: CachePlan = prepare(model, compatible)
        mx.eval(model.parameters())
        self.bank, self.model = AdapterBank(layout, 2, RANK, self.plan.layout.dtype), model
        install_adapters(model, self.bank)

    @cached_property
    def footprint(self) -> Footprint:
        return footprint_of(self.model, self.plan, self.bank)

    def peaks(self, groups: Sequence[Group]) -> Iterator[Peak]:
        """Measured one after the other, with layers computed again and not."""
        for group in groups:
            for again in (True, False):
                measured, gradients = self._measured(group, again)
                expected = self.footprint.micro_step_bytes(group.tokens, group.prompt + group.answer, again)
                yield Peak(group, again, measured, expected + gradients)

    def _measured(self, group: Group, again: bool) -> tuple[int, int]:
        """The peak of an update of one micro-step, and the bytes of its gradients.

        MLX does not run ahead of the device meanwhile: what it holds then depends on how fast the device is.
        """
        trainable = TrainableModel(self.model, self.bank, self.plan, lambda *_: again, self.footprint.segment)
        training = RLTrainingConfig(micro_batch_tokens=1 << 20).resolved(float32=True)
        trainer = GRPOTrainer(trainable, training, ModelConfig(), measure_kl=False)
        policy = Policy(trainable.layout, ModelConfig())
        mx.eval(policy.state.params)
        outcome = trainer.begin(policy, UpdateBatch(tuple(group.samples(min(self.plan.vocab_size, 1000)))))
        gc.collect()  # what earlier models have left is not freed meanwhile
        limit = mx.set_memory_limit(1)
        try:
            while trainer.waits():
                trainer.advance()
        finally:
            mx.set_memory_limit(limit)
        outcome.result(timeout=0)
        _, (most, _), *_ = trainer.pacer._passes
        return most, 4 * policy.parameters
