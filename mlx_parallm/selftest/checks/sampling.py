"""How tokens are sampled: filters, seeds, and the logprobs of the distribution that samples. In NumPy and float64
here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.batch.distributions import streams, uniforms
from mlx_parallm.core.requests import SamplingParams
from mlx_parallm.selftest.check import Check, Outcome
from mlx_parallm.selftest.limits import Limit
from mlx_parallm.selftest.tested import TestedAnswer, TestedModel

Weights = NDArray[np.float64]

_PLAIN = SamplingParams(top_logprobs=0, processed_logprobs=True)
_FILTERED = (
    replace(_PLAIN, temperature=0.7, top_k=5, seed=1),
    replace(_PLAIN, temperature=1.2, top_p=0.8, seed=2),
    replace(_PLAIN, temperature=0.9, min_p=0.1, seed=3),
    replace(_PLAIN, temperature=1.0, top_k=40, top_p=0.95, min_p=0.02, seed=4),
)
_UNFILTERED = tuple(replace(_PLAIN, temperature=heat, seed=seed) for heat, seed in ((0.7, 5), (1.0, 6), (1.5, 7)))
_ANSWER = 12


async def _filters(tested: TestedModel) -> Outcome:
    """Logprobs of what was sampled from filtered distributions. A token that a filter drops has none, so its difference
    is infinite."""
    limit = _limit(tested)

    def differences(answer: TestedAnswer, weights: Weights, params: SamplingParams) -> list[float]:
        found = []
        for row, token, logprob in zip(weights, answer.tokens, answer.logprobs, strict=True):
            if _is_clear(row, params, 10 * limit.value):
                kept = np.where(_kept(row, params), row, 0.0)
                with np.errstate(divide="ignore"):
                    found.append(float(abs(np.log(kept[token] / kept.sum()) - logprob)))
        return found

    return Outcome.of(await _drawn(tested, _FILTERED, differences), limit)


async def _seeds(tested: TestedModel) -> Outcome:
    """How far the random number of each sample lies outside the sampled token's part of the cumulative distribution."""

    def distances(answer: TestedAnswer, weights: Weights, params: SamplingParams) -> list[float]:
        start, found = streams([params.seed]), []
        for at, (row, token) in enumerate(zip(weights, answer.tokens, strict=True)):
            share = row / row.sum()
            above = share[: token + 1].sum()
            number = float(uniforms(start, np.array([at]))[0])
            found.append(max(number - above, above - share[token] - number, 0.0))
        return found

    return Outcome.of(await _drawn(tested, _UNFILTERED, distances), _limit(tested))


def _limit(tested: TestedModel) -> Limit:
    return tested.rounding.of_logprobs.times(4, "a temperature of 0.7 and a sum over the vocabulary")


async def _drawn(
    tested: TestedModel,
    options: tuple[SamplingParams, ...],
    compared: Callable[[TestedAnswer, Weights, SamplingParams], list[float]],
) -> list[float]:
    """Samples an answer with each of the options, in one batch, and compares each with the plain model's weights."""

    async def row(at: int) -> list[float]:
        params, prompt = options[at], tested.prompt(10 + 7 * at, seed=100 + at)
        answer = await tested.ask(prompt, _ANSWER, sampling=params)
        rows = (await tested.plain_logprobs([*prompt, *answer.tokens[:-1]]))[len(prompt) - 1 :].astype(np.float64)
        return compared(answer, np.exp((rows - rows.max(-1, keepdims=True)) / params.temperature), params)

    rows = await asyncio.gather(*map(row, range(len(options))))
    return [each for found in rows for each in found]


def _kept(weights: Weights, params: SamplingParams, wider: float = 0.0) -> NDArray[np.bool_]:
    """The tokens that top-k, top-p and min-p leave. `wider`: filters that are looser by this share; tighter, if it is
    negative."""
    floor = params.min_p * (1 - wider)
    descending = np.sort(weights)[::-1]
    if params.top_k:
        descending = descending[: params.top_k]
        floor = max(floor, descending[-1])
    if params.top_p < 1:
        larger = np.cumsum(descending) - descending
        floor = max(floor, descending[larger < params.top_p * (1 + wider) * descending.sum()].min())
    kept: NDArray[np.bool_] = weights >= floor * (1 - max(wider, 0.0))
    return kept


def _is_clear(weights: Weights, params: SamplingParams, rounding: float) -> bool:
    """Whether no token is so near the edge of a filter that rounding decides about it."""
    exact = _kept(weights, params)
    return all(bool((_kept(weights, params, wider) == exact).all()) for wider in (-rounding, rounding))


def _is_float32(tested: TestedModel) -> bool:
    """With 16 bits, the model's rounding moves tokens across the edges of filters. Drawing itself is float32 always."""
    return tested.rounding.float32


FILTERS = Check(
    name="sampling filters",
    compared="logprobs of tokens drawn with temperature, top-k, top-p and min-p, with float64 over a plain pass",
    advice=(
        "Tokens are drawn from another distribution than was asked for, and trajectories have wrong logprobs. Do not "
        "train; sample with temperature 0; attach the report to an issue."
    ),
    run=_filters,
    applies=_is_float32,
)
SEEDS = Check(
    name="sampling seeds",
    compared="tokens drawn in one batch, with those that their seeds' random numbers select in a plain pass",
    advice="Seeds do not decide what is drawn, so answers cannot be repeated. Attach the report to an issue.",
    run=_seeds,
    applies=_is_float32,
)
