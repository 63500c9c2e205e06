"""Losses that clients compute themselves: sums over the tokens of their sequences."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TokenLoss(StrEnum):
    """The losses of `SummedLoss`."""

    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"


@dataclass(frozen=True, slots=True)
class SummedLoss:
    """A sum over all tokens of all sequences, not divided by anything. With the policy's logprob log π of a target at
    temperature 1, the logprob log q under which it was sampled, r = π / q, and the advantage A:

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
