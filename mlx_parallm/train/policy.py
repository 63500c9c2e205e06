"""One adapter in training: its LoRA factors, its AdamW state, and copies of both to go back to or to save."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import mlx.core as mx
import numpy as np
from mlx.optimizers import AdamW, cosine_decay, join_schedules, linear_schedule
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from mlx_parallm import atomic
from mlx_parallm.adapters.weights import ALL_LINEAR, AdapterLayout, AdapterWeights, LoRAPair, lora_scale
from mlx_parallm.config import LearningRateSchedule, ModelConfig, OptimizerConfig
from mlx_parallm.config.types import human_bytes
from mlx_parallm.errors import MALFORMED, AdapterFileError, AdapterTooLargeError, ConfigError, InvalidRequestError
from mlx_parallm.train.context import Params
from mlx_parallm.train.pacing import Stage, StageKind

_OPTIMIZER_FILE = "optimizer.safetensors"
_TRAINER_FILE = "trainer.json"
_COPY_BYTES = 8 << 20
"""Bytes copied to host memory in one call on the device thread, which takes a few milliseconds."""

_LEARNING_RATE, _STEP = "learning_rate", "step"
"""Leaves of an optimizer's state: the learning rate of the last step, and how many steps it has made."""


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """A policy in host memory; restoring it is exact to the bit.

    `weights`: float32 NumPy arrays. `optimizer`: the leaves of AdamW's state by dotted path. `step`: optimizer steps.
    """

    weights: AdapterWeights
    optimizer: Mapping[str, NDArray[np.generic]]
    step: int

    def save(self, folder: Path) -> None:
        """Writes the optimizer's state and the step; the weights are in the adapter's own files. Raises OSError."""
        atomic.write_file(folder / _OPTIMIZER_FILE, save(dict(self.optimizer)))  # `save_file` raises no OSError
        (folder / _TRAINER_FILE).write_text(json.dumps({"step": self.step}) + "\n")

    @classmethod
    def load(cls, folder: Path, weights: AdapterWeights) -> PolicySnapshot:
        """Reads a checkpoint. Raises AdapterFileError: it has no state of a trainer, or a damaged one."""
        try:
            facts = json.loads((folder / _TRAINER_FILE).read_text())
            return cls(weights, load((folder / _OPTIMIZER_FILE).read_bytes()), int(facts["step"]))
        except (OSError, SafetensorError, *MALFORMED) as error:
            raise AdapterFileError(
                f"{folder.name} holds no usable state of a trainer: save it from a training run"
            ) from error


@dataclass(frozen=True, eq=False)
class PolicyState:
    """A policy at one moment: LoRA factors (`params`, float32), their scale, AdamW's state and the number of optimizer
    steps. `rslora`: see `AdapterWeights`.

    Nothing writes to its arrays: each update makes new ones. They are read on the device thread only.
    """

    params: Params
    optimizer: dict[str, Any]
    scale: float
    step: int
    rslora: bool = False

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last step."""
        return float(self.optimizer[_LEARNING_RATE].item())

    def stages(self) -> Iterator[Stage]:
        """The stages of an optimizer step that has made this state: one for each linear, so that the intermediate
        arrays of few of them exist at a time."""
        for path, pair in self.params.items():
            values = sum(leaf.size for leaf in pair.values())
            yield Stage(StageKind.OPTIMIZER, [pair, self.optimizer[path]], values)
        yield Stage(StageKind.OPTIMIZER, [self.optimizer[_STEP], self.optimizer[_LEARNING_RATE]], 1)

    def copied(self, nbytes: int = _COPY_BYTES) -> Iterator[PolicySnapshot | None]:
        """Copies the state to host memory, about `nbytes` per step of the iterator.

        Yields None after each part, and the snapshot at the end.
        """
        copies: dict[int, NDArray[np.generic]] = {}
        size = 0
        for _, leaf in tree_flatten([self.params, self.optimizer]):
            copies[id(leaf)] = np.array(leaf)
            size += leaf.nbytes
            if size >= nbytes:
                size = 0
                yield None
        pairs = {
            path: LoRAPair(copies[id(pair["a"])], copies[id(pair["b"])], self.scale)
            for path, pair in self.params.items()
        }
        state = {name: copies[id(leaf)] for name, leaf in tree_flatten(self.optimizer)}
        yield PolicySnapshot(AdapterWeights(pairs, self.rslora), state, self.step)


class Policy:
    """The LoRA factors and the optimizer of one adapter, which updates replace as a whole. Device thread only.

    Attributes:
        state: the policy now.
        states: all its states that are still referenced: the current one, and earlier ones to go back to or to save.
        nbytes: size of one state.
        parameters: number of trained values.

    Args:
        lora: rank, alpha and target modules of the factors.
        seed: determines the initial a factors; b factors start at zero, so that the policy equals the base model.
        start: where training continues from; None: from new factors.

    Raises:
        ConfigError: the model has no linear layer with a target's name.
        InvalidRequestError: `start` has other linear layers, ranks or scales than `lora`.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        lora: ModelConfig,
        seed: int = 0,
        start: PolicySnapshot | None = None,
    ) -> None:
        self._layout = layout
        self._lora = lora
        self._seed = seed
        self.scale = lora_scale(lora.lora_alpha, lora.lora_rank, lora.lora_rslora)
        self.state: PolicyState
        self.states: WeakSet[PolicyState] = WeakSet()
        self.restore(None)
        if start is not None:
            self.restore(start)
        self.nbytes = sum(int(leaf.nbytes) for _, leaf in tree_flatten([self.params, self.state.optimizer]))
        self.parameters = sum(pair["a"].size + pair["b"].size for pair in self.params.values())

    @property
    def params(self) -> Params:
        """The current factors."""
        return self.state.params

    def weights(self) -> AdapterWeights:
        """The current factors, as MLX arrays."""
        pairs = {path: LoRAPair(p["a"], p["b"], self.scale) for path, p in self.state.params.items()}
        return AdapterWeights(pairs, self._lora.lora_rslora)

    # -- states ----------------------------------------------------------------------------------

    def stepped(self, gradients: Params, settings: OptimizerConfig, scale: float = 1.0) -> PolicyState:
        """Returns the state after one optimizer step, which `PolicyState.stages` computes; the policy itself stays as
        it is. The gradients and the change of the factors are multiplied by `scale`, but the optimizer's state is not.

        The arrays of the new state take the place of the gradients, if the caller has no other reference to those.
        """
        before, optimizer = self.state, new_optimizer(settings)
        learning_rate = optimizer.state[_LEARNING_RATE]
        # the step replaces leaves in this tree; a schedule sets the learning rate by itself
        optimizer.state = {**tree_map(lambda leaf: leaf, before.optimizer), _LEARNING_RATE: learning_rate}
        if scale != 1.0:
            gradients = tree_map(lambda leaf: scale * leaf, gradients)
        params = optimizer.apply_gradients(gradients, before.params)
        if scale != 1.0:
            params = _between(before.params, params, scale)
        after = replace(before, params=cast(Params, params), optimizer=optimizer.state, step=before.step + 1)
        self.states.add(after)
        return after

    def moved_back(self, after: PolicyState, before: PolicyState, share: float) -> PolicyState:
        """Returns `after` with factors interpolated from `before` to `after` by `share`. The optimizer's state is
        that of `after`; the policy itself stays as it is."""
        params = _between(before.params, after.params, share)
        mx.eval(params)
        nearer = replace(after, params=params)
        self.states.add(nearer)
        return nearer

    def restore(self, goal: PolicyState | PolicySnapshot | None) -> None:
        """Sets the policy to a state or a snapshot; None: to a new policy, equal to the base model.

        Raises:
            InvalidRequestError: the snapshot has other linear layers, ranks or scales than the policy.
        """
        self.state = self.state_of(goal)
        self.states.add(self.state)

    def state_of(self, goal: PolicyState | PolicySnapshot | None) -> PolicyState:
        """The state that `restore` sets; raises what it raises."""
        if goal is None:
            return self._fresh(new_factors(self._layout, self._lora, self._seed), 0)
        return self._loaded(goal) if isinstance(goal, PolicySnapshot) else goal

    def _fresh(self, params: Params, step: int) -> PolicyState:
        """These factors with the state of a new optimizer, which does not depend on its settings."""
        optimizer = new_optimizer(OptimizerConfig())
        optimizer.init(params)
        mx.eval(params, optimizer.state)
        return PolicyState(params, optimizer.state, self.scale, step, self._lora.lora_rslora)

    def _loaded(self, snapshot: PolicySnapshot) -> PolicyState:
        """The state of a snapshot."""
        self._check(snapshot)
        pairs = snapshot.weights.pairs
        params = {path: {"a": mx.array(pairs[path].a), "b": mx.array(pairs[path].b)} for path in self.params}
        state = self._fresh(params, snapshot.step)
        if not snapshot.optimizer:
            return state
        optimizer = tree_map_with_path(lambda name, _: mx.array(snapshot.optimizer[name]), state.optimizer)
        mx.eval(optimizer)
        return replace(state, optimizer=optimizer)

    def _check(self, snapshot: PolicySnapshot) -> None:
        pairs, lora = snapshot.weights.pairs, self._lora
        same = pairs.keys() == self.params.keys() and all(
            pair.rank == lora.lora_rank and math.isclose(pair.scale, self.scale) for pair in pairs.values()
        )
        leaves = {name for name, _ in tree_flatten(self.state.optimizer)}
        if not same or (snapshot.optimizer and snapshot.optimizer.keys() != leaves):
            raise InvalidRequestError(
                f"its rank is {snapshot.weights.rank}, alpha {snapshot.weights.alpha:g}"
                f"{' (rsLoRA)' if snapshot.weights.rslora else ''} and targets "
                f"{', '.join(snapshot.weights.targets)}; this server trains rank {lora.lora_rank}, alpha "
                f"{lora.lora_alpha:g}{' (rsLoRA)' if lora.lora_rslora else ''} and "
                f"{', '.join(sorted(lora.lora_target_modules))}: "
                "give --lora-rank, --lora-alpha and --lora-target-modules the adapter's values"
            )


def _between(before: Params, after: Params, share: float) -> Params:
    """The factors at this share of the way from `before` to `after`."""
    return cast(Params, tree_map(lambda old, new: old + share * (new - old), before, after))


def new_factors(layout: AdapterLayout, lora: ModelConfig, seed: int) -> dict[str, dict[str, mx.array]]:
    """LoRA factors of a new policy. a: uniform in ±1/√in_features, as in mlx-lm; b: zero."""
    chosen = layout.named(lora.lora_target_modules)
    if missing := set(lora.lora_target_modules) - {ALL_LINEAR, *(spec.target for spec in chosen)}:
        known = sorted({spec.target for spec in layout})
        raise ConfigError(
            f"lora_target_modules: this model has no {', '.join(sorted(missing))} that can be trained; it has "
            f"{', '.join(known) or 'none'}"
        )
    random = np.random.default_rng(seed)
    params = {}
    for spec in chosen:
        bound = 1 / math.sqrt(spec.in_features)
        a = random.uniform(-bound, bound, spec.a_shape(lora.lora_rank)).astype(np.float32)
        params[spec.path] = {"a": mx.array(a), "b": mx.zeros(spec.b_shape(lora.lora_rank), mx.float32)}
    return params


def check_room(layout: AdapterLayout, lora: ModelConfig, memory: int) -> None:
    """Raises AdapterTooLargeError: a policy of these settings takes more than `memory` bytes while it learns, for its
    factors, their gradients and AdamW's two means, all float32."""
    rank, targets = lora.lora_rank, lora.lora_target_modules
    specs = layout.named(targets)
    needed = 4 * 4 * sum(math.prod(spec.a_shape(rank)) + math.prod(spec.b_shape(rank)) for spec in specs)
    if needed > memory:
        raise AdapterTooLargeError(
            f"training {', '.join(targets)} with rank {rank} needs {human_bytes(needed)}, and requests and training "
            f"share {human_bytes(memory)}: lower --lora-rank, or name fewer linears in --lora-target-modules, such as "
            "those of attention"
        )


def new_optimizer(settings: OptimizerConfig) -> AdamW:
    return AdamW(
        learning_rate=_learning_rate(settings),
        betas=[settings.beta1, settings.beta2],
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        bias_correction=True,
    )


def _learning_rate(config: OptimizerConfig) -> float | Callable[[mx.array], mx.array]:
    """The learning rate, or a function of the number of steps: a warm-up from near zero, then the schedule."""
    peak, warmup, decay = config.learning_rate, config.warmup_updates, config.decay_updates
    if config.schedule is LearningRateSchedule.CONSTANT and not warmup:
        return peak
    after: Mapping[LearningRateSchedule, Callable[[mx.array], mx.array]] = {
        LearningRateSchedule.CONSTANT: lambda _: mx.array(peak),
        LearningRateSchedule.LINEAR: linear_schedule(peak, 0.0, decay),
        LearningRateSchedule.COSINE: cosine_decay(peak, decay),
    }
    if not warmup:
        return after[config.schedule]
    rising = linear_schedule(peak / (warmup + 1), peak, warmup)
    return cast(Callable[[mx.array], mx.array], join_schedules([rising, after[config.schedule]], [warmup]))
