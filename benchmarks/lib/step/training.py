"""A training micro-step beside one of a plain trainer: their kernels, counted from the graphs. Nothing is computed.

All train LoRA factors of rank 16 of all linears of the bundled model. The plain trainer (`bench.plain_trainer`) takes
eight answers to one prompt, 496 tokens with the padding, as it is and with its gradients compiled by `mx.compile`. Ours
takes the same eight, whose prompt it computes once, and four such groups together, 552 tokens.

Metal trains with attention that is not fused, as MLX builds it here too. It has kernels of norms and rotary embeddings,
forward and backward; as many primitives stand for them on both sides.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from typing import Any
from unittest.mock import patch

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from benchmarks.lib.step.graph import VIEWS, primitives
from benchmarks.lib.training.batch import GROUP, LORA, samples
from benchmarks.lib.training.plain import plain_trainer
from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.bench import plain_trainer as plain
from mlx_parallm.config import ModelConfig, RLTrainingConfig
from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.device import prepare_device
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters
from mlx_parallm.train.data import Datum, UpdateBatch
from mlx_parallm.train.forwards import MicroStep, MicroStepInput, TrainingForwards
from mlx_parallm.train.model import TrainableModel
from mlx_parallm.train.pacing import Pacer, Stage
from mlx_parallm.train.trainer import GRPOTrainer

PLAIN, COMPILED, OURS, TOGETHER = "plain trainer", "plain trainer, compiled", "ours", "ours, four groups together"
_PRODUCTS = frozenset({"Matmul", "AddMM", "QuantizedMatmul", "GatherMM", "GatherQMM"})
_ALSO_VIEWS = frozenset({"CustomTransforms", "NumberOfElements"})
_TOKENS = 1024
"""Largest micro-step. All samples fit."""


@dataclass(frozen=True, slots=True)
class MicroStepCounts:
    """nodes: primitives of the graph
    kernels: launched on Metal
    products: those of them that multiply matrices
    waits: evaluations that wait for the device, if no request does
    """

    nodes: int
    kernels: int
    products: int
    waits: int


def counted() -> dict[str, MicroStepCounts]:
    """The counts of each micro-step, by name. It takes about half a minute."""
    every = samples(0)
    with _gpu_graphs():
        trainer = plain_trainer(load_bundled(dequantize=False)[0])
        rows = plain._rows(every[:GROUP])

        def gradients(factors: Any) -> Any:
            trainer._factors = factors
            return trainer._gradients(rows, GROUP)

        factors = trainer._factors
        counts = {PLAIN: _counts(gradients(factors), 1), COMPILED: _counts(mx.compile(gradients)(factors), 1)}
        ours = _Ours()
        return counts | {OURS: ours.counts(every[:GROUP]), TOGETHER: ours.counts(every)}


class _Ours:
    """A trainer on a model of its own, which keeps its activations as the plain trainer does."""

    def __init__(self) -> None:
        model, _, _ = load_bundled(dequantize=False)
        mx.eval(model.eval().parameters())  # they are converted from those of the file
        plan = prepare(model)
        bank = AdapterBank(adapter_layout(model), 2, LORA.rank, plan.layout.dtype)
        install_adapters(model, bank)
        lora = ModelConfig(lora_rank=LORA.rank, lora_alpha=LORA.alpha)
        settings = RLTrainingConfig(micro_batch_tokens=_TOKENS).resolved(plan.layout.dtype == mx.float32)
        self._trainer = GRPOTrainer(TrainableModel(model, bank, plan, lambda *_: False), settings, lora, False)

    def counts(self, data: Sequence[Datum]) -> MicroStepCounts:
        """Those of the only micro-step of an update."""
        policy = self._trainer.open("counted")
        self._trainer.begin(policy, UpdateBatch(tuple(data)))
        arrays: list[object] = []
        gradients, run, waits = TrainingForwards.gradients, Pacer.run, 0

        def seen(forwards: TrainingForwards, inputs: Sequence[MicroStepInput]) -> MicroStep:
            made = gradients(forwards, inputs)
            arrays.extend([made.results, *(stage.arrays for stage in made.stages)])
            return made

        def only_one(pacer: Pacer, stages: Iterable[Stage], tokens: int) -> Iterator[None]:
            yield from run(pacer, stages, tokens)
            raise _Over

        def wait(*_: Any) -> None:
            nonlocal waits
            waits += 1

        self._trainer.pace(math.inf)
        with (
            patch.object(TrainingForwards, "gradients", seen),
            patch.object(Pacer, "run", only_one),
            patch.multiple(mx, eval=wait, synchronize=wait, async_eval=lambda *_: None),
            suppress(_Over),
        ):
            while True:
                self._trainer.advance()
        return _counts(arrays, waits)


class _Over(Exception):  # noqa: N818  it is no error
    """The micro-step is over."""


def _counts(arrays: object, waits: int) -> MicroStepCounts:
    leaves = {id(leaf): leaf for leaf in _leaves(arrays)}
    names = ["Compiled" if name.startswith("Compiled") else name for name in primitives(list(leaves.values()))]
    kernels = [name for name in names if name not in VIEWS | _ALSO_VIEWS]
    return MicroStepCounts(len(names), len(kernels), sum(name in _PRODUCTS for name in kernels), waits)


def _leaves(value: object) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name))
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_leaves, value.values()))
    elif isinstance(value, Iterable):
        yield from chain.from_iterable(map(_leaves, value))


@contextmanager
def _gpu_graphs() -> Iterator[None]:
    """While the block runs, MLX builds differentiable graphs as for a Mac's GPU."""
    with ExitStack() as patches:
        patches.callback(prepare_device)  # switches compilation off again on a CPU
        mx.enable_compile()
        patches.enter_context(patch.object(mx, "default_device", lambda: mx.gpu))
        patches.enter_context(patch.multiple(mx.fast, rms_norm=_norm, rope=_rope))
        yield


def _norm(x: mx.array, *_: Any) -> mx.array:
    """One kernel forward, two backward."""
    return mx.sin(x)


def _rope(x: mx.array, *_: Any, **__: Any) -> mx.array:
    """One kernel forward, one backward."""
    return -x
