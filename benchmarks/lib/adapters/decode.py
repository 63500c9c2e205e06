"""Measures the time that adapters add to a decode step of 16 rows, without HTTP.

Each round runs a block of a few steps of every variant, so that a drift of the machine cancels:

    round   base | q/v one, 8, 64 | all linears one, 8, 64 | base     after each variant, its low-rank products alone

All 64 slots of a bank hold the same weights. The values do not change the time, but their place in memory does.
"""

import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import mean

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.nn as nn  # isort: skip
from mlx.utils import tree_unflatten

from benchmarks.lib.adapters.files import QV, RANK, fill, random_adapter
from benchmarks.lib.adapters.gather_products import GatherProducts
from benchmarks.lib.rows import begin, open_row, rewind
from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.app.device import build_runner
from mlx_parallm.batch.runner import Launched
from mlx_parallm.config import Config
from mlx_parallm.core.requests import SamplingParams
from mlx_parallm.model.linears import AdaptedLinear, install_adapters
from mlx_parallm.model.manager import SharedModelManager

ROWS, SLOTS = 16, 64
CONTEXT, STEPS = 60, 8
"""The steps of a block have 61 to 68 tokens of context."""
WARM_UP_STEPS = 2
FIRST_TOKEN = 1000
ROUNDS_A_REPEAT = 5

ONE, EIGHT, MANY = 1, 8, SLOTS
QV_ONLY, ALL = "q/v", "all linears"
TARGETS: dict[str, Collection[str]] = {QV_ONLY: QV, ALL: ()}


@dataclass(frozen=True, slots=True)
class Variant:
    """Rows that use `adapters` different adapters of the linears in `targets`."""

    linears: str
    adapters: int

    @property
    def name(self) -> str:
        return f"{self.linears}, {'one for all' if self.adapters == ONE else f'{self.adapters} mixed'}"

    def slots(self, seed: int) -> list[int]:
        """The slot of each row. With 64 adapters, each seed uses another 16 of them."""
        chosen = random.Random(seed).sample(range(1, self.adapters + 1), min(self.adapters, ROWS))
        return [chosen[row % len(chosen)] for row in range(ROWS)]


VARIANTS = tuple(Variant(linears, adapters) for linears in TARGETS for adapters in (ONE, EIGHT, MANY))


@dataclass(slots=True)
class DecodeCost:
    """Seconds of a step in each round: of the base model, of each variant by name, and of its low-rank products
    alone."""

    base: list[float] = field(default_factory=list)
    steps: dict[str, list[float]] = field(default_factory=lambda: {variant.name: [] for variant in VARIANTS})
    products: dict[str, list[float]] = field(default_factory=lambda: {variant.name: [] for variant in VARIANTS})

    def percent(self, variant: Variant) -> list[float]:
        """Loss of throughput against the base model in the same round, in percent."""
        return [100 * (1 - base / step) for step, base in zip(self.steps[variant.name], self.base, strict=True)]

    def added(self, variant: Variant) -> list[float]:
        """Seconds that the adapters add to a step."""
        return [step - base for step, base in zip(self.steps[variant.name], self.base, strict=True)]

    def least_percent(self, variant: Variant, times: float = 1.0) -> list[float]:
        """Loss of throughput in percent if adapters added only `times` the time of their low-rank products alone."""
        alone = [times * seconds for seconds in self.products[variant.name]]
        return [100 * more / (base + more) for more, base in zip(alone, self.base, strict=True)]


def measure(rounds: int) -> DecodeCost:
    """In this process."""
    manager = SharedModelManager(progress=False)
    rigs = {linears: _Rig(manager, targets) for linears, targets in TARGETS.items()}
    _warm_up(rigs)
    result = DecodeCost()
    for number in range(rounds):
        _round(rigs, number, result)
        costs = "  ".join(f"{variant.name} {result.percent(variant)[-1]:+.1f}" for variant in VARIANTS)
        print(f"  base {1e3 * result.base[-1]:.1f} ms, % less: {costs}", flush=True)
    return result


class _Rig:
    """A bank whose 64 slots hold adapters of these linears, and rows to decode. All rigs share one model and take
    turns."""

    def __init__(self, manager: SharedModelManager, targets: Collection[str]) -> None:
        _unwrap(manager.model)
        self._model = manager.model
        self._bank = _filled_bank(manager, targets)
        self._runner = build_runner(manager, self._bank, Config())
        self._rows = [
            open_row(self._runner, CONTEXT, STEPS, 0, SamplingParams(temperature=0.0), FIRST_TOKEN) for _ in range(ROWS)
        ]
        self._products = GatherProducts(self._bank, ROWS)

    def install(self) -> None:
        """Makes the model's linears read this rig's bank."""
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
        """Decodes `steps` tokens from a fixed context length, each step launched before the tokens of the one before
        are read.

        Returns the last tokens. The content of the context does not change the time, so the rows' length is simply set.
        """
        for place, (row, slot) in enumerate(zip(self._rows, slots, strict=True)):
            rewind(row, CONTEXT, slot, FIRST_TOKEN + place)
        step: Launched | None = None
        for _ in range(steps):
            pending, previous = begin(self._runner, self._rows, step), step
            self._runner.wait()
            step = self._runner.sample(pending)
            if previous is not None:
                self._runner.read(previous)
        assert step is not None
        return [draw.token for draw in self._runner.read(step)]


def _warm_up(rigs: dict[str, _Rig]) -> None:
    """Runs every variant once. Raises RuntimeError if adapters change no token, because their cost would then be
    zero."""
    for variant in VARIANTS:
        rig = rigs[variant.linears]
        rig.install()
        base = rig.decode([0] * ROWS, WARM_UP_STEPS)
        if rig.decode(variant.slots(0), WARM_UP_STEPS) == base:
            raise RuntimeError(f"{variant.name}: the rows draw what they draw without adapters")
        rig.product_seconds(variant.slots(0))


def _round(rigs: dict[str, _Rig], number: int, result: DecodeCost) -> None:
    """Runs one round: the base model first and last, the variants between them in an order that is reversed every
    time."""
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
    bank = AdapterBank(manager.adapter_layout, SLOTS, RANK, manager.plan.layout.dtype)
    weights = random_adapter(bank.layout, seed=0, targets=targets)
    fill(bank, weights)
    return bank


def _unwrap(model: nn.Module) -> None:
    """Puts the plain linears back into the model, if they are adapted."""
    linears = [(path, part.base) for path, part in model.named_modules() if isinstance(part, AdaptedLinear)]
    model.update_modules(tree_unflatten(linears))
