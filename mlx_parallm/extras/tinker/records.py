"""What clients ask of policies that they train step by step, and what comes of it.

These are adapters apart from the server's own training: nothing is collected for them, and only their client says when
gradients are computed and when a step is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Layers:
    """Which linear layers a policy changes. Those of a block that are not part of its attention count as `mlp`. `head`
    makes the logits."""

    attention: bool = True
    mlp: bool = True
    head: bool = True


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A LoRA policy. `seed`: of its initial weights."""

    rank: int
    alpha: float
    seed: int
    layers: Layers = Layers()


@dataclass(frozen=True, slots=True)
class PolicyCard:
    """A policy in training. `targets`: the last names of the layers that it changes, such as `q_proj`. `step`: the
    number of optimizer steps so far."""

    name: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    step: int = 0


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The loss of some sequences, and for each of them the logprobs of its targets under the policy, in nats."""

    loss: float
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """AdamW with bias correction and decoupled weight decay. `max_grad_norm`: gradients are scaled down to this norm;
    infinite: they are not."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float


@dataclass(frozen=True, slots=True)
class PolicyStep:
    """The result of an optimizer step. `step`: the number of steps so far. `metrics`: grad_norm, loss and others."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
