"""Compares the training part of an update with the plain trainer, with and without checkpointed layers.

Both train the bundled model from the same factors on the same batch, in turns, without serving; the plain trainer has
its own copy of the model. Our trainer uses micro-steps of the size that it uses while serving. `peak_mb` is the memory
that one of our micro-steps takes at most, with the gradients.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from benchmarks.lib.training.batch import samples
from benchmarks.lib.training.plain import plain_trainer
from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.app.device import device_schedule, mlx_limits
from mlx_parallm.app.parts import Parts
from mlx_parallm.app.training import footprint_of, micro_steps_sized, trainable
from mlx_parallm.bench.plain_trainer import Gradients
from mlx_parallm.config import Config, ModelConfig, OptimizerConfig, RLTrainingConfig
from mlx_parallm.kv.device_memory import default_budget
from mlx_parallm.model.device import machine_memory, on_cpu
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.train.context import Params
from mlx_parallm.train.data import Datum, UpdateBatch
from mlx_parallm.train.packing import split_samples
from mlx_parallm.train.policy import Policy, PolicyState
from mlx_parallm.train.trainer import GRPOTrainer

CHECKPOINTED, KEPT = "layers checkpointed", "activations kept"
KINDS = {CHECKPOINTED: True, KEPT: None}
"""Values of `gradient_checkpointing`. The default keeps activations if there is memory for them."""
WARM_UPS = 2
"""Updates before the first one that counts, because micro-steps are sized by the duration of earlier ones."""
SIZE = 0.02
"""Standard deviation of the random factors b. If they were zero, factors a would have no gradient."""


@dataclass(slots=True)
class Cost:
    """Seconds in each repeat. `difference`: norm of the difference between the gradients, relative to the plain ones;
    `plain_difference`: the same for the plain trainer with MLX's own sum over the vocabulary.
    """

    name: str
    ours_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    micro_steps: int = 0
    micro_batch_tokens: int = 0
    peak_mb: float = math.nan
    longest_unit_s: list[float] = field(default_factory=list)
    difference: float = math.nan
    plain_difference: float = math.nan


def measure(repeats: int) -> list[Cost]:
    """Runs the benchmark in this process."""
    bench = _Bench()
    exact = bench.exact()
    costs = [Cost(name) for name in KINDS]
    for cost in costs:
        bench.warm_up(cost, exact)
    for _ in range(repeats):
        for cost in costs:
            bench.time(cost)
    return costs


class _Bench:
    def __init__(self) -> None:
        manager = SharedModelManager(progress=False)
        adapters = Config().adapters
        bank = manager.install_bank(adapters.max_loras, adapters.max_lora_rank)
        self._ours = {name: Ours(manager, bank, checkpointing) for name, checkpointing in KINDS.items()}
        self._start = random_factors(self._ours[KEPT].policy.params)
        self._plain = plain_trainer(SharedModelManager(progress=False).model)

    def exact(self) -> Gradients:
        """The plain trainer's gradients with the precise sum over the vocabulary."""
        return self._plain_update(KEPT, precise=True)

    def warm_up(self, cost: Cost, exact: Gradients) -> None:
        """Runs the first updates, and records the differences between the gradients."""
        ours = self._ours[cost.name]
        cost.plain_difference = difference(self._plain_update(cost.name), exact)
        for _ in range(WARM_UPS):
            ours.update(self._start, samples(0))
        cost.micro_batch_tokens = ours.micro_batch_tokens
        cost.difference = difference(ours.gradients, exact)

    def time(self, cost: Cost) -> None:
        """Times both trainers, one after the other."""
        ours = self._ours[cost.name]
        cost.plain_s.append(_seconds(lambda: self._plain_update(cost.name)))
        cost.ours_s.append(_seconds(lambda: ours.update(self._start, samples(0))))
        cost.micro_steps, cost.peak_mb = ours.units, ours.peak / 1e6
        cost.longest_unit_s.append(ours.longest_s)
        print(f"  {cost.name:<20} plain {cost.plain_s[-1]:5.2f} s, ours {cost.ours_s[-1]:5.2f} s", flush=True)

    def _plain_update(self, name: str, precise: bool = False) -> Gradients:
        self._plain.put(self._start)
        return self._plain.update(samples(0), KINDS[name] is True, precise)


class Ours:
    """A trainer that the calling thread runs. `gradients`, `units` (of device work), the seconds of the longest of
    them, the `peak` memory in bytes and the `computed_tokens` are those of the last update."""

    def __init__(self, manager: SharedModelManager, bank: AdapterBank, checkpointing: bool | None) -> None:
        stall_s = device_schedule(Config(), on_cpu()).max_decode_stall_s
        memory = default_budget(mlx_limits(Config()).memory, 0, 0, machine_memory().ram if on_cpu() else None)
        wanted = RLTrainingConfig(optimizer=OptimizerConfig(max_grad_norm=1e30), gradient_checkpointing=checkpointing)
        footprint = footprint_of(manager.model, manager.plan, bank)
        training = micro_steps_sized(wanted, footprint, manager, memory, stall_s)
        self.micro_batch_tokens = training.micro_batch_tokens
        model = trainable(training, footprint, manager, bank, memory, Parts())
        self.gradients: Gradients = {}
        self.units, self.longest_s, self.peak, self.computed_tokens = 0, 0.0, 0, 0
        self.trainer = GRPOTrainer(model, training, ModelConfig(), measure_kl=False)
        self.trainer.pace(stall_s)
        self.policy = Policy(model.layout, ModelConfig())
        self._keep_gradients()

    def update(self, start: Params, batch: Sequence[Datum]) -> None:
        """Makes one update from these factors. Raises its error."""
        self.policy.restore(replace(self.policy.state, params=start))
        self.units, self.longest_s = 0, 0.0
        outcome = self.trainer.begin(self.policy, UpdateBatch(tuple(batch)))
        while self.trainer.waits():
            self.longest_s = max(self.longest_s, _seconds(self.trainer.advance))
            self.units += 1
        self.peak = self.trainer.pacer.pass_bytes
        self.computed_tokens = sum(part.size for part in split_samples(batch, self.micro_batch_tokens))
        outcome.result(timeout=0)

    def _keep_gradients(self) -> None:
        stepped = self.policy.stepped

        def watched(gradients: Params, settings: OptimizerConfig, scale: float = 1.0) -> PolicyState:
            self.gradients = {f"{path}.lora_{name}": g for path, pair in gradients.items() for name, g in pair.items()}
            return stepped(gradients, settings, scale)

        self.policy.stepped = watched  # type: ignore[method-assign]


def random_factors(fresh: Params) -> Params:
    """The factors with random b."""
    keys = iter(mx.random.split(mx.random.key(0), len(fresh)))
    made = {
        path: {"a": p["a"], "b": SIZE * mx.random.normal(p["b"].shape, key=next(keys))} for path, p in fresh.items()
    }
    mx.eval(made)
    return made


def difference(gradients: Gradients, exact: Gradients) -> float:
    """Norm of the difference divided by the norm, over all arrays together."""
    assert gradients.keys() == exact.keys()
    apart = {name: gradients[name] - exact[name] for name in exact}
    return _norm(apart) / _norm(exact)


def _norm(arrays: Mapping[str, mx.array]) -> float:
    return math.sqrt(sum(float(array.square().sum()) for array in arrays.values()))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
