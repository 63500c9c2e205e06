"""The training part of an update, ours beside the plain one; layers checkpointed in both, and in neither.

Both train the bundled model from the same factors on the same batch, in turns, without serving; the plain one a copy
of it that was loaded alike. Ours goes in micro-steps of the size that they have beside requests.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from plain_trainer import Gradients, PlainTrainer
from rl_batch import samples

from mlx_parallm.app.adapters import build_bank
from mlx_parallm.app.schedule import device_schedule
from mlx_parallm.config import Config
from mlx_parallm.model.attention import install_hook
from mlx_parallm.model.device import on_cpu
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.rl.policy import Policy
from mlx_parallm.rl.samples import UpdateBatch, UpdateOutcome
from mlx_parallm.rl.settings import OptimizerSettings, TrainerSettings
from mlx_parallm.rl.trainable import Params, TrainableModel
from mlx_parallm.rl.trainer import GRPOTrainer

CHECKPOINTED, KEPT = "layers checkpointed", "activations kept"
KINDS = {CHECKPOINTED: True, KEPT: False}
WARM_UPS = 2
"""Updates before the first that counts: micro-steps are sized by what earlier ones took."""
SIZE = 0.02
"""Of factors b, drawn at random: where they are zero, factors a have no gradient."""


@dataclass(slots=True)
class Cost:
    """Seconds, repeat by repeat. `difference`: of the gradients, over the plain ones' norm; `plain_difference`: the
    same of the plain trainer with MLX's own sum over the vocabulary.
    """

    name: str
    ours_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    micro_steps: int = 0
    difference: float = math.nan
    plain_difference: float = math.nan


def measure(repeats: int) -> list[Cost]:
    """In this process."""
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
        manager = SharedModelManager.load(None, progress=False)
        bank = build_bank(manager, Config())
        style = install_hook(manager.model)
        self._ours = {
            name: _Ours(TrainableModel(manager.model, bank, style, checkpointed), checkpointed)
            for name, checkpointed in KINDS.items()
        }
        self._start = _factors(self._ours[KEPT].policy.params)
        self._plain = PlainTrainer(SharedModelManager.load(None, progress=False).model)

    def exact(self) -> Gradients:
        """The plain ones, with a sum over the vocabulary that can be compared with."""
        return self._plain_update(KEPT, precise=True)

    def warm_up(self, cost: Cost, exact: Gradients) -> None:
        """Notes how far the gradients are apart."""
        ours = self._ours[cost.name]
        cost.plain_difference = _difference(self._plain_update(cost.name), exact)
        for _ in range(WARM_UPS):
            ours.update(self._start)
        cost.difference = _difference(ours.gradients, exact)

    def time(self, cost: Cost) -> None:
        """Both, one after the other."""
        ours = self._ours[cost.name]
        cost.plain_s.append(_seconds(lambda: self._plain_update(cost.name)))
        cost.ours_s.append(_seconds(lambda: ours.update(self._start)))
        cost.micro_steps = ours.units
        print(f"  {cost.name:<20} plain {cost.plain_s[-1]:5.2f} s, ours {cost.ours_s[-1]:5.2f} s", flush=True)

    def _plain_update(self, name: str, precise: bool = False) -> Gradients:
        self._plain.put(self._start)
        return self._plain.update(samples(0), KINDS[name], precise)


class _Ours:
    """A trainer that this thread drives. Of the last update: `gradients`, and `units` of device work."""

    def __init__(self, model: TrainableModel, checkpointed: bool) -> None:
        unclipped = OptimizerSettings(max_grad_norm=math.inf)
        settings = TrainerSettings(optimizer=unclipped, checkpoint_layers=checkpointed, measure_kl=False)
        self.gradients: Gradients = {}
        self.units = 0
        self._trainer = GRPOTrainer(model, settings)
        self._trainer.pace(device_schedule(Config(), on_cpu()).max_decode_stall_s)
        self.policy = Policy(model.layout, settings.lora, settings.optimizer)
        self._keep_gradients()

    def update(self, start: Params) -> None:
        """From these factors. Raises what went wrong."""
        told: list[UpdateOutcome | Exception] = []
        self.policy.params, self.units = start, 0
        self._trainer.begin(self.policy, UpdateBatch(samples(0)), told.append)
        while self._trainer.waits():
            self._trainer.advance()
            self.units += 1
        if isinstance(told[0], Exception):
            raise told[0]

    def _keep_gradients(self) -> None:
        apply = self.policy.apply

        def applied(gradients: Params, scale: float = 1.0) -> None:
            self.gradients = {f"{path}.lora_{name}": g for path, pair in gradients.items() for name, g in pair.items()}
            apply(gradients, scale)

        self.policy.apply = applied  # type: ignore[method-assign]


def _factors(fresh: Params) -> Params:
    """Fresh ones, with random b."""
    keys = iter(mx.random.split(mx.random.key(0), len(fresh)))
    made = {
        path: {"a": p["a"], "b": SIZE * mx.random.normal(p["b"].shape, key=next(keys))} for path, p in fresh.items()
    }
    mx.eval(made)
    return made


def _difference(gradients: Gradients, exact: Gradients) -> float:
    """Norm of the difference over the norm, all arrays together."""
    assert gradients.keys() == exact.keys()
    apart = {name: gradients[name] - exact[name] for name in exact}
    return _norm(apart) / _norm(exact)


def _norm(arrays: Mapping[str, mx.array]) -> float:
    return math.sqrt(sum(float(array.square().sum()) for array in arrays.values()))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
