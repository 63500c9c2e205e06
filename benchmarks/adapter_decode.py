"""What adapters add to a decode step of 16 rows, without HTTP.

Blocks of a few steps, all variants in every round, so that a drift of the machine cancels:

    round   base | q/v one, 8, 64 | all linears one, 8, 64 | base     each variant followed by its products alone

One set of weights lies in all 64 slots of a bank: what the numbers are changes no time, where they lie does.
"""

import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import mean

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.nn as nn  # isort: skip
from adapter_files import QV, RANK, layout_of, random_adapter
from gather_products import GatherProducts
from mlx.utils import tree_unflatten

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.app import build_runner
from mlx_parallm.batch.runner import Row, Step
from mlx_parallm.batch.sampler import RowSampling
from mlx_parallm.batch.slab import KVRow
from mlx_parallm.config import Config
from mlx_parallm.core import SamplingParams
from mlx_parallm.model.adapted import AdaptedLinear, install_adapters
from mlx_parallm.model.manager import SharedModelManager

ROWS, SLOTS = 16, 64
CONTEXT, STEPS = 60, 8
"""A block's steps go from 61 to 68 tokens of context."""
WARM_UP_STEPS = 2
FIRST_TOKEN = 1000
ROUNDS_A_REPEAT = 5

ONE, EIGHT, MANY = 1, 8, SLOTS
QV_ONLY, ALL = "q/v", "all linears"
TARGETS: dict[str, Collection[str]] = {QV_ONLY: QV, ALL: ()}


@dataclass(frozen=True, slots=True)
class Variant:
    """Rows that use `adapters` different ones, of those that change these linears."""

    linears: str
    adapters: int

    @property
    def name(self) -> str:
        return f"{self.linears}, {'one for all' if self.adapters == ONE else f'{self.adapters} mixed'}"

    def slots(self, seed: int) -> list[int]:
        """One slot for each row; of 64 adapters another 16 with every seed."""
        chosen = random.Random(seed).sample(range(1, self.adapters + 1), min(self.adapters, ROWS))
        return [chosen[row % len(chosen)] for row in range(ROWS)]


VARIANTS = tuple(Variant(linears, adapters) for linears in TARGETS for adapters in (ONE, EIGHT, MANY))


@dataclass(slots=True)
class DecodeCost:
    """Seconds of a step, round by round: of the base, of each variant by name, and of its products alone."""

    base: list[float] = field(default_factory=list)
    steps: dict[str, list[float]] = field(default_factory=lambda: {variant.name: [] for variant in VARIANTS})
    products: dict[str, list[float]] = field(default_factory=lambda: {variant.name: [] for variant in VARIANTS})

    def percent(self, variant: Variant) -> list[float]:
        """How much less throughput there is with the adapters than with the base, in the same round."""
        return [100 * (1 - base / step) for step, base in zip(self.steps[variant.name], self.base, strict=True)]

    def added(self, variant: Variant) -> list[float]:
        """What the adapters add to a step, in seconds."""
        return [step - base for step, base in zip(self.steps[variant.name], self.base, strict=True)]

    def least_percent(self, variant: Variant, times: float = 1.0) -> list[float]:
        """How much less throughput there would be if the adapters added `times` what their products take alone."""
        alone = [times * seconds for seconds in self.products[variant.name]]
        return [100 * more / (base + more) for more, base in zip(alone, self.base, strict=True)]


def measure(rounds: int) -> DecodeCost:
    """In this process."""
    manager = SharedModelManager.load(None, progress=False)
    rigs = {linears: _Rig(manager, targets) for linears, targets in TARGETS.items()}
    _warm_up(rigs)
    result = DecodeCost()
    for number in range(rounds):
        _round(rigs, number, result)
        costs = "  ".join(f"{variant.name} {result.percent(variant)[-1]:+.1f}" for variant in VARIANTS)
        print(f"  base {1e3 * result.base[-1]:.1f} ms, % less: {costs}", flush=True)
    return result


class _Rig:
    """A bank whose 64 slots hold adapters of these linears, and rows to step. Rigs share one model and take turns."""

    def __init__(self, manager: SharedModelManager, targets: Collection[str]) -> None:
        _unwrap(manager.model)
        self._model = manager.model
        self._bank = _filled_bank(manager, targets)
        self._runner = build_runner(manager, self._bank, Config())
        self._rows = [_row(self._runner.cache.allocate(CONTEXT + STEPS)) for _ in range(ROWS)]
        self._products = GatherProducts(self._bank, ROWS)

    def install(self) -> None:
        """From here on the model's linears read this rig's bank."""
        _unwrap(self._model)
        install_adapters(self._model, self._bank)

    def step_seconds(self, slots: Sequence[int]) -> float:
        started = time.perf_counter()
        self.decode(slots, STEPS)
        return (time.perf_counter() - started) / STEPS

    def product_seconds(self, slots: Sequence[int]) -> float:
        started = time.perf_counter()
        for _ in range(STEPS):
            self._products.step(slots)
        return (time.perf_counter() - started) / STEPS

    def decode(self, slots: Sequence[int], steps: int) -> list[int]:
        """Steps from the same context as ever, each launched before the last one is read. Returns the last tokens.

        What the context holds does not matter for time, so the rows' length is simply set.
        """
        for place, (row, slot) in enumerate(zip(self._rows, slots, strict=True)):
            row.kv.length, row.kv.adapter_slot, row.input_token = CONTEXT, slot, FIRST_TOKEN + place
        step: Step | None = None
        for _ in range(steps):
            previous, step = step, self._runner.draw(self._runner.begin(self._rows, step))
            if previous is not None:
                self._runner.read(previous)
        assert step is not None
        return [draw.token for draw in self._runner.read(step)]


def _warm_up(rigs: dict[str, _Rig]) -> None:
    """Raises RuntimeError when adapters change nothing: their cost would then be nothing too."""
    for variant in VARIANTS:
        rig = rigs[variant.linears]
        rig.install()
        base = rig.decode([0] * ROWS, WARM_UP_STEPS)
        if rig.decode(variant.slots(0), WARM_UP_STEPS) == base:
            raise RuntimeError(f"{variant.name}: the rows draw what they draw without adapters")
        rig.product_seconds(variant.slots(0))


def _round(rigs: dict[str, _Rig], number: int, result: DecodeCost) -> None:
    """The base goes first and last; the order of the variants turns round every time."""
    base = [_base_seconds(rigs[ALL])]
    for variant in VARIANTS if number % 2 == 0 else reversed(VARIANTS):
        rig, slots = rigs[variant.linears], variant.slots(number)
        rig.install()
        result.steps[variant.name].append(rig.step_seconds(slots))
        result.products[variant.name].append(rig.product_seconds(slots))
    base.append(_base_seconds(rigs[ALL]))
    result.base.append(mean(base))


def _base_seconds(rig: _Rig) -> float:
    rig.install()
    return rig.step_seconds([0] * ROWS)


def _filled_bank(manager: SharedModelManager, targets: Collection[str]) -> AdapterBank:
    bank = AdapterBank(layout_of(manager), SLOTS, RANK, manager.kv_dtype)
    weights = random_adapter(bank.layout, seed=0, targets=targets)
    for slot in reversed(range(1, SLOTS + 1)):  # the last one first: the arrays then grow once
        for _ in bank.write(slot, weights):
            pass
    return bank


def _unwrap(model: nn.Module) -> None:
    """Takes the linears back from the bank that they read, if there is one."""
    linears = [(path, part.base) for path, part in model.named_modules() if isinstance(part, AdaptedLinear)]
    model.update_modules(tree_unflatten(linears))


def _row(kv: KVRow | None) -> Row:
    assert kv is not None
    return Row(kv, RowSampling(SamplingParams(temperature=0.0)), input_token=None)
