"""Reads and changes parts of samples, in the tests of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_parallm.train.data import Datum


def answer(sample: Datum) -> tuple[int, ...]:
    """The trained tokens."""
    return tuple(sample.token_ids[at] for at in sample.trained())


def advantage(sample: Datum) -> float:
    """The advantage that all trained tokens have."""
    (value,) = {sample.advantages[at] for at in sample.trained()}
    return value


def drawn_logprobs(sample: Datum) -> list[float]:
    """The sampling logprobs of the trained tokens."""
    return [sample.sampling_logprobs[at] for at in sample.trained()]


def with_advantage(sample: Datum, value: float) -> Datum:
    return replace(sample, advantages=(value,) * len(sample.token_ids))


def with_logprobs_of(sample: Datum, logprobs: Sequence[float]) -> Datum:
    """With these sampling logprobs of the trained tokens."""
    every = [0.0] * len(sample.token_ids)
    for at, value in zip(sample.trained(), logprobs, strict=True):
        every[at] = value
    return replace(sample, sampling_logprobs=tuple(every))


def with_temperature(sample: Datum, temperature: float) -> Datum:
    return replace(sample, sampled=tuple(replace(each, temperature=temperature) for each in sample.sampled))
