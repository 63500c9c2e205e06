"""Configuration sections for tests: copies with other values, and a loss."""

from __future__ import annotations

from typing import Any, TypeVar

from mlx_parallm.config import Algorithm, ResolvedLoss, RLTrainingConfig
from mlx_parallm.config.types import Section

S = TypeVar("S", bound=Section)
R = TypeVar("R", bound=RLTrainingConfig)

TRAINING = RLTrainingConfig().resolved(float32=True)


def changed(section: S, **fields: Any) -> S:
    """A copy with these fields, which may also be fields of an inner section. Values are not validated."""
    own = {name: value for name, value in fields.items() if name in type(section).model_fields}
    rest = {name: value for name, value in fields.items() if name not in own}
    for name in type(section).model_fields:
        inner = own.get(name, getattr(section, name))
        if isinstance(inner, Section) and (found := {n: rest.pop(n) for n in [*rest] if n in type(inner).model_fields}):
            own[name] = changed(inner, **found)
    assert not rest, f"unknown fields: {sorted(rest)}"
    return section.model_copy(update=own)


def loss_config(algorithm: Algorithm = Algorithm.GRPO, **fields: Any) -> ResolvedLoss:
    """A loss with the clip range of GRPO, whatever the algorithm."""
    return changed(TRAINING.loss, algorithm=algorithm, **fields)


def limited(settings: R, **limits: float | None) -> R:
    """A copy of `rl_training` with these limits of divergences, by signal; None: no limit."""
    rules = {signal: changed(getattr(settings.divergence, signal), limit=limit) for signal, limit in limits.items()}
    return settings.model_copy(update={"divergence": settings.divergence.model_copy(update=rules)})
