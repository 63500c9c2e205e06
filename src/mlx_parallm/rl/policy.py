"""One adapter in training: its float32 factors, and the state of its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast
from weakref import ref

import mlx.core as mx
import numpy as np
from mlx.optimizers import AdamW, cosine_decay, join_schedules, linear_schedule
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from mlx_parallm.adapters.layout import AdapterLayout
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair
from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.rl.kept import KeptPolicy
from mlx_parallm.rl.settings import LoRASettings, OptimizerSettings, Schedule
from mlx_parallm.rl.snapshot import PolicySnapshot
from mlx_parallm.rl.trainable import Params

_RATE = "learning_rate"
"""Of an optimizer's state: the last step's."""


class Policy:
    """Device thread only. `params` are replaced by an update, never written in place: who has them keeps them.

    Attributes:
        step: optimizer steps made.
        nbytes: of the factors and the optimizer's state.

    Args:
        start: where to go on from; None: fresh factors, equal to the base because b is zero.

    Raises:
        ConfigError: the model has no linear of a target's name.
        InvalidRequestError: `start` is of other linears, ranks or scales than those configured.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        lora: LoRASettings,
        optimizer: OptimizerSettings,
        start: PolicySnapshot | None = None,
    ) -> None:
        self._layout = layout
        self._lora = lora
        self._settings = optimizer
        self.scale = lora.alpha / lora.rank
        self._kept: tuple[ref[KeptPolicy], ...] = ()  # replaced, never written to
        self.params: Params
        self.step: int
        self.restore(None)
        if start is not None:
            self.restore(start)
        self.nbytes = sum(int(leaf.nbytes) for _, leaf in tree_flatten([self.params, self._optimizer.state]))

    @property
    def tensors(self) -> int:
        """How many arrays are trained."""
        return 2 * len(self.params)

    @property
    def parameters(self) -> int:
        """How many numbers."""
        return sum(pair["a"].size + pair["b"].size for pair in self.params.values())

    @property
    def gradient_nbytes(self) -> int:
        """Of one set of gradients, float32."""
        return 4 * self.parameters

    @property
    def learning_rate(self) -> float:
        """Of the last step."""
        return float(self._optimizer.learning_rate.item())

    def weights(self) -> AdapterWeights:
        """As they are now, MLX's."""
        return AdapterWeights({path: LoRAPair(p["a"], p["b"], self.scale) for path, p in self.params.items()})

    def apply(self, gradients: Params, scale: float = 1.0) -> None:
        """One optimizer step, multiplied by `scale`; its state takes in the gradients as they are."""
        before, after = self.params, self._optimizer.apply_gradients(gradients, self.params)
        if scale != 1.0:
            after = tree_map(lambda old, new: old + scale * (new - old), before, after)
        self.params = cast(Params, after)
        self.step += 1
        mx.eval(self.params, self._optimizer.state)

    # -- going back ------------------------------------------------------------------------------

    def keep(self) -> KeptPolicy:
        """The policy as it is now; the same object until it changes."""
        held = self._held()
        for kept in held:
            if kept.params is self.params:
                return kept
        kept = KeptPolicy(self.params, tree_map(_same, self._optimizer.state), self.scale, self.step, self.nbytes)
        self._kept = tuple(map(ref, [*held, kept]))
        return kept

    @property
    def kept_nbytes(self) -> int:
        """Of what somebody still holds of what was kept, the policy as it is now left out. Any thread may read it."""
        return sum(kept.nbytes for kept in self._held() if kept.params is not self.params)

    def _held(self) -> list[KeptPolicy]:
        return [kept for each in self._kept if (kept := each()) is not None]

    def restore(self, goal: KeptPolicy | PolicySnapshot | None) -> None:
        """None: as a new one is. Raises InvalidRequestError: a snapshot is of another kind of adapter."""
        if goal is None:
            self.params, self.step = _fresh(self._layout, self._lora), 0
            self._start_optimizer()
        elif isinstance(goal, KeptPolicy):
            self.params, self.step = goal.params, goal.step
            self._optimizer.state = tree_map(_same, goal.optimizer)  # an update replaces leaves in the tree itself
        else:
            self._read(goal)

    def _read(self, snapshot: PolicySnapshot) -> None:
        """Of the optimizer's state everything counts but the learning rate, which is the configured one."""
        self._check(snapshot)
        pairs = snapshot.weights.pairs
        self.params = {path: {"a": mx.array(pairs[path].a), "b": mx.array(pairs[path].b)} for path in self.params}
        self.step = snapshot.step
        self._start_optimizer()
        if snapshot.optimizer:
            self._optimizer.state = tree_map_with_path(
                lambda name, leaf: leaf if name == _RATE else mx.array(snapshot.optimizer[name]), self._optimizer.state
            )
            mx.eval(self._optimizer.state)

    def _start_optimizer(self) -> None:
        self._optimizer = _adamw(self._settings)
        self._optimizer.init(self.params)
        mx.eval(self.params, self._optimizer.state)

    def _check(self, snapshot: PolicySnapshot) -> None:
        pairs, lora = snapshot.weights.pairs, self._lora
        same = pairs.keys() == self.params.keys() and all(
            pair.rank == lora.rank and math.isclose(pair.scale, self.scale) for pair in pairs.values()
        )
        leaves = {name for name, _ in tree_flatten(self._optimizer.state)}
        if not same or (snapshot.optimizer and snapshot.optimizer.keys() != leaves):
            raise InvalidRequestError(
                f"its rank is {snapshot.weights.rank}, alpha {snapshot.weights.alpha:g} and targets "
                f"{', '.join(snapshot.weights.targets)}; this server trains rank {lora.rank}, alpha {lora.alpha:g} and "
                f"{', '.join(sorted(lora.targets))}: start it with the adapter's own"
            )


def _fresh(layout: AdapterLayout, lora: LoRASettings) -> dict[str, dict[str, mx.array]]:
    """a uniform in ±1/√in, as mlx-lm's; b zero."""
    chosen = [spec for spec in layout.linears.values() if spec.target in lora.targets]
    missing = set(lora.targets) - {spec.target for spec in chosen}
    if missing:
        known = sorted({spec.target for spec in layout.linears.values()})
        raise ConfigError(
            f"lora_target_modules: this model has no {', '.join(sorted(missing))} that can be trained; it has "
            f"{', '.join(known) or 'none'}"
        )
    random = np.random.default_rng(lora.seed)
    params = {}
    for spec in chosen:
        bound = 1 / math.sqrt(spec.in_features)
        a = random.uniform(-bound, bound, (spec.in_features, lora.rank)).astype(np.float32)
        params[spec.path] = {"a": mx.array(a), "b": mx.zeros((lora.rank, spec.out_features), mx.float32)}
    return params


def _same(leaf: mx.array) -> mx.array:
    return leaf


def _adamw(settings: OptimizerSettings) -> AdamW:
    return AdamW(
        learning_rate=_learning_rate(settings),
        betas=list(settings.betas),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        bias_correction=True,
    )


def _learning_rate(settings: OptimizerSettings) -> float | Callable[[mx.array], mx.array]:
    """Warm-up from near zero, then the schedule; by the number of steps made."""
    peak, warmup, decay = settings.learning_rate, settings.warmup_steps, settings.decay_steps
    if settings.schedule is Schedule.CONSTANT and not warmup:
        return peak
    after: Mapping[Schedule, Callable[[mx.array], mx.array]] = {
        Schedule.CONSTANT: lambda _: mx.array(peak),
        Schedule.LINEAR: linear_schedule(peak, 0.0, decay),
        Schedule.COSINE: cosine_decay(peak, decay),
    }
    if not warmup:
        return after[settings.schedule]
    rising = linear_schedule(peak / (warmup + 1), peak, warmup)
    return cast(Callable[[mx.array], mx.array], join_schedules([rising, after[settings.schedule]], [warmup]))
