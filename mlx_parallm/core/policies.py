"""Policies that clients train step by step: losses of tokens, optimizer steps, and the protocol that makes them.

They are adapters apart from the server's own training: nothing is collected for them, and only their client says when
gradients are computed and when a step is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from mlx_parallm.core.adapters import AdapterRef, CheckpointCard


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


class TokenLoss(StrEnum):
    """The losses of `SummedLoss`."""

    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"


@dataclass(frozen=True, slots=True)
class SummedLoss:
    """A sum over all tokens of all sequences, not divided by anything. With the policy's logprob log π of a target at
    temperature 1, the logprob log q under which it was drawn, r = π / q, and the advantage A:

        cross_entropy        -A log π; the advantages are weights of any sign
        importance_sampling  -r A
        ppo                  -min(r A, clip(r) A)
        cispo                -clip(r) A log π; only the last factor has a gradient

    clip(r) is between `clip_low` and `clip_high`.
    """

    name: TokenLoss
    clip_low: float = 0.0
    clip_high: float = 0.0


@dataclass(frozen=True, slots=True)
class TargetedTokens:
    """N tokens of a sequence, and at each place the token whose logprob the loss reads, given the tokens up to that
    place. It is mostly the next token. All fields have N values.

    `sampling_logprobs`: in nats; empty for `cross_entropy`.
    """

    token_ids: tuple[int, ...]
    targets: tuple[int, ...]
    advantages: tuple[float, ...]
    sampling_logprobs: tuple[float, ...] = ()


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


class PolicyClient(Protocol):
    """The asyncio interface of such policies, used on the event loop's thread only. `name` is the adapter's.

    Its methods raise UnknownModelError if no policy of that name is open. What is asked of one policy must be awaited
    before the next is asked; different policies are trained together.
    """

    @property
    def max_rank(self) -> int:
        """The largest rank of a policy."""
        ...

    @property
    def head_can_be_trained(self) -> bool:
        """Whether policies of this model can change the linear layer that makes the logits."""
        ...

    def layers_of(self, targets: Sequence[str]) -> Layers:
        """The layers that an adapter with these targets changes; see `AdapterCard.targets`."""
        ...

    async def create(self, name: str, spec: PolicySpec) -> PolicyCard:
        """Starts a policy that equals the base model.

        Raises:
            InvalidRequestError: the rank is too large, or there is no layer to change.
            OverloadedError: as many policies are open as the operator allows.
            ConflictError: there is an adapter of that name.
        """
        ...

    async def create_from(self, name: str, source: str, tag: str, with_optimizer: bool) -> PolicyCard:
        """Starts a policy from a checkpoint of the adapter `source`, with its rank and layers.

        Raises:
            UnknownModelError: there is no such checkpoint.
            AdapterFileError: it cannot be used.
            OverloadedError, ConflictError: see `create`.
        """
        ...

    def card(self, name: str) -> PolicyCard: ...

    async def forward(self, name: str, sequences: Sequence[TargetedTokens], loss: SummedLoss) -> TokenScores:
        """The loss and the logprobs of all targets.

        Raises:
            StepFailedError: the device failed.
        """
        ...

    async def forward_backward(self, name: str, sequences: Sequence[TargetedTokens], loss: SummedLoss) -> TokenScores:
        """Adds the gradients of these sequences to those since the last step.

        A target whose advantage and sampling logprob are both 0 adds nothing to a gradient. If a sequence has others,
        the logprob of such a target is not computed, and 0 is returned in its place.

        Raises:
            StepFailedError: the device failed; the gradients are as before.
        """
        ...

    async def step(self, name: str, adam: AdamSettings) -> PolicyStep:
        """Makes an optimizer step from the gradients since the last step, which are then forgotten.

        Raises:
            ConflictError: there are none, or something in the step was not finite; the policy is as before.
            StepFailedError: the device failed; the policy is as before.
        """
        ...

    async def restore(self, name: str, source: str, tag: str, with_optimizer: bool) -> None:
        """Goes back to a checkpoint of the adapter `source`.

        Raises:
            UnknownModelError: there is no such checkpoint.
            InvalidRequestError: it has another rank or other layers, or cannot be used.
        """
        ...

    async def save(self, name: str, tag: str, overwrite: bool) -> CheckpointCard:
        """Writes the policy and its optimizer's state as a checkpoint with this tag.

        Raises:
            InvalidRequestError: the tag is not a plain name.
            ConflictError: another checkpoint has the tag, and `overwrite` is false.
            StorageError: the disk failed.
        """
        ...

    async def publish(self, name: str) -> AdapterRef:
        """Makes the policy as it is now a version that requests can name. The newest few of a policy are kept, until it
        is closed."""
        ...

    def saved(self, name: str, tag: str) -> AdapterRef:
        """The version in a checkpoint, which requests can name from now on. The policy need not be open.

        Raises:
            UnknownModelError: there is no such checkpoint.
        """
        ...

    def checkpoints(self, name: str) -> tuple[CheckpointCard, ...]:
        """The checkpoints of an adapter, oldest first. The policy need not be open."""
        ...

    async def close(self, name: str) -> None:
        """Ends a policy: its gradients, its optimizer's state and the versions that are in no checkpoint are dropped.
        What is under way for it fails."""
        ...
