"""Reads and changes parts of samples, in the tests of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_parallm.train.samples import Sample


def answer(sample: Sample) -> tuple[int, ...]:
    """The trained tokens."""
    return tuple(sample.token_ids[at] for at in sample.trained())


def advantage(sample: Sample) -> float:
    """The advantage that all trained tokens have."""
    (value,) = {sample.advantages[at] for at in sample.trained()}
    return value


def drawn_logprobs(sample: Sample) -> list[float]:
    """The sampling logprobs of the trained tokens."""
    return [sample.sampling_logprobs[at] for at in sample.trained()]


def with_advantage(sample: Sample, value: float) -> Sample:
    return replace(sample, advantages=(value,) * len(sample.token_ids))


def with_logprobs_of(sample: Sample, logprobs: Sequence[float]) -> Sample:
    """With these sampling logprobs of the trained tokens."""
    every = [0.0] * len(sample.token_ids)
    for at, value in zip(sample.trained(), logprobs, strict=True):
        every[at] = value
    return replace(sample, sampling_logprobs=tuple(every))


def with_temperature(sample: Sample, temperature: float) -> Sample:
    return replace(sample, stretches=tuple(replace(each, temperature=temperature) for each in sample.stretches))


def with_last_token(sample: Sample, token: int) -> Sample:
    return replace(sample, token_ids=(*sample.token_ids[:-1], token))
