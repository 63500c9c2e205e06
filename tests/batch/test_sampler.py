"""The whole sampler against a straightforward NumPy one, token for token."""

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlx_parallm.batch.distributions import streams, uniforms
from mlx_parallm.batch.sampling import RowSampling, TokenCounts, has_penalties, plan_sampling, sample
from mlx_parallm.core.requests import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Case:
    """One row: its options, its logits and its past."""

    params: SamplingParams
    logits: np.ndarray
    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()

    def row(self):
        counts = TokenCounts(self.prompt, self.generated, len(self.logits)) if has_penalties(self.params) else None
        return RowSampling(self.params, self.min_tokens, self.end_ids, sampling_logprobs=True, counts=counts)


def reference(case):
    """(token, sampling logprob, margin) in float64; `margin`: how near rounding could come to another token."""
    p, x = case.params, case.logits.astype(np.float64)
    counts = np.bincount(np.array(case.generated, int), minlength=len(x))
    seen = (counts > 0) | (np.bincount(np.array(case.prompt, int), minlength=len(x)) > 0)
    x = np.where(seen, np.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty), x)
    x = x - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)
    for token, bias in p.logit_bias:
        x[token] += bias
    if len(case.generated) < case.min_tokens:
        x[list(case.end_ids)] = -math.inf
    if p.temperature == 0 or p.top_k == 1:
        return int(x.argmax()), 0.0, 1.0
    w = np.exp((x - x.max()) / p.temperature)
    if p.top_k:
        w = np.where(w >= np.sort(w)[-min(p.top_k, len(w))], w, 0)
    margin = 1.0
    if p.top_p < 1:
        larger = np.array([w[w > each].sum() for each in w]) / w.sum()
        margin = min(margin, np.abs(larger - p.top_p).min())
        w = np.where(larger < p.top_p, w, 0)
    if p.min_p > 0:
        margin = min(margin, np.abs(w[w < 1] - p.min_p).min(initial=1.0))
        w = np.where(w >= p.min_p, w, 0)
    cumulative = w.cumsum() / w.sum()
    u = float(uniforms(streams([p.seed]), np.array([len(case.generated)]))[0])
    margin = min(margin, np.abs(cumulative - u).min())
    token = int(np.argmax(cumulative > u))
    return token, math.log(w[token] / w.sum()), margin


def run(cases):
    plan = plan_sampling([case.row() for case in cases], len(cases[0].logits))
    logits = mx.array(np.stack([case.logits for case in cases]).astype(np.float32))
    return sample(logits, plan, [len(case.generated) for case in cases])


def options(vocab):
    token = st.integers(0, vocab - 1)
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.5, 0.7, 1.0, 1.0, 2.0]),
        top_k=st.sampled_from([0, 0, 1, 2, 3, vocab // 2, vocab, vocab + 5]),
        top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999]),
        min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4, 1.0]),
        seed=st.integers(-(2**70), 2**70),
        presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
        frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
        repetition_penalty=st.sampled_from([1.0, 2.0, 0.5]),
        logit_bias=st.lists(st.tuples(token, st.sampled_from([-100.0, -1.0, 0.5, 3.0])), max_size=3).map(tuple),
    )


@st.composite
def batches(draw):
    """Logits are eighths and penalties dyadic, so equal float64 values are equal in fp32 too: ties are common."""
    vocab = draw(st.sampled_from([2, 5, 64, 65, 200]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    past = st.lists(st.integers(0, vocab - 1), max_size=6).map(tuple)
    cases = []
    for _ in range(draw(st.integers(1, 5))):
        logits = np.round(rng.normal(0, draw(st.sampled_from([0.3, 2.0])), vocab) * 8) / 8
        logits[rng.random(vocab) < draw(st.sampled_from([0.0, 0.0, 0.6]))] = -np.inf
        logits[rng.integers(vocab)] = 1.0
        case = Case(draw(options(vocab)), logits, draw(past), draw(past), draw(st.integers(0, 4)))
        if np.isfinite(logits[1:]).any():
            case.end_ids = (0,)
        cases.append(case)
    return cases


@settings(max_examples=100, deadline=None)
@given(batches())
def test_every_row_equals_the_numpy_reference(cases):
    expected = [reference(case) for case in cases]
    assume(all(margin > 2e-6 for _, _, margin in expected))
    got = run(cases)
    assert got.tokens.tolist() == [token for token, _, _ in expected]
    np.testing.assert_allclose(np.array(got.sampling_logprobs), [logprob for _, logprob, _ in expected], atol=1e-5)


FULL = 49152
FULL_OPTIONS = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=20),
    SamplingParams(top_k=50, top_p=0.8),
    SamplingParams(top_k=1000, top_p=0.95),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.5, temperature=1.5),
    SamplingParams(min_p=0.02),
    SamplingParams(top_k=20000, min_p=0.001),
    SamplingParams(presence_penalty=1.0, repetition_penalty=1.3, top_p=0.9),
    SamplingParams(logit_bias=((7, 5.0), (9, -100.0)), frequency_penalty=0.4),
    GREEDY,
]


def full_cases(scale, seed):
    rng = np.random.default_rng(seed)
    cases = []
    for number, params in enumerate(FULL_OPTIONS):
        logits = rng.normal(0, scale, FULL).astype(np.float32)
        past = tuple(logits.argsort()[-6:].tolist())
        options = SamplingParams(**{**_fields(params), "seed": seed + number})
        cases.append(Case(options, logits, past[:3], past[2:] * 2))
    return cases


def _fields(params):
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def reference_large(case):
    """`reference` with top-p's quadratic part by sorting; values are distinct here."""
    p = case.params
    if p.top_p == 1:
        return reference(case)
    without = Case(SamplingParams(**{**_fields(p), "top_p": 1.0}), case.logits, case.prompt, case.generated)
    x = case.logits.astype(np.float64)
    counts = np.bincount(np.array(case.generated, int), minlength=len(x))
    seen = (counts > 0) | (np.bincount(np.array(case.prompt, int), minlength=len(x)) > 0)
    x = np.where(seen, np.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty), x)
    x -= p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
    w = np.exp((x - x.max()) / p.temperature)
    if p.top_k:
        w = np.where(w >= np.sort(w)[-p.top_k], w, 0)
    ordered = np.sort(w)[::-1]
    floor = ordered[np.cumsum(ordered) - ordered < p.top_p * w.sum()][-1]
    without.logits = np.where(w >= floor, case.logits, -np.inf)
    return reference(without)


@pytest.mark.parametrize("scale", [0.05, 1.0, 3.0], ids=["flat", "middling", "peaked"])
def test_a_real_vocabulary_equals_the_reference(scale):
    cases = full_cases(scale, seed=11)
    expected = [reference_large(case) for case in cases]
    got = run(cases)
    agree = [a == b for a, (b, _, _) in zip(got.tokens.tolist(), expected, strict=True)]
    clear = [margin > 1e-6 for _, _, margin in expected]
    assert sum(clear) >= len(cases) - 3
    assert all(same for same, certain in zip(agree, clear, strict=True) if certain)
    for same, value, (_, logprob, _) in zip(agree, got.sampling_logprobs.tolist(), expected, strict=True):
        assert not same or value == pytest.approx(logprob, abs=2e-5)


def test_a_row_draws_the_same_whatever_its_neighbours():
    cases = full_cases(2.0, seed=5)
    together, backwards = run(cases), run(cases[::-1])
    for number, case in enumerate(cases):
        alone = run([case])
        for other, place in ((together, number), (backwards, len(cases) - 1 - number)):
            assert alone.tokens[0].item() == other.tokens[place].item()
            assert alone.sampling_logprobs[0].item() == other.sampling_logprobs[place].item()


def test_positions_and_seeds_give_new_draws_and_the_same_ones_again():
    logits = mx.zeros((3, 1000))
    plan = plan_sampling([RowSampling(SamplingParams(seed=s)) for s in (1, 2, 1)], 1000)
    first = [sample(logits, plan, [p, p, p]).tokens.tolist() for p in range(8)]
    again = [sample(logits, plan, [p, p, p]).tokens.tolist() for p in range(8)]
    assert first == again
    assert all(row[0] == row[2] for row in first)
    assert len({row[0] for row in first}) > 6
    assert [row[0] for row in first] != [row[1] for row in first]


def test_a_tiny_temperature_neither_overflows_nor_draws_another_token():
    logits = mx.array([[-3e4, 9.0, 2e4, 1.9e4]])
    plan = plan_sampling([RowSampling(SamplingParams(temperature=1e-4), sampling_logprobs=True)], 4)
    got = sample(logits, plan, [0])
    assert (got.tokens.item(), got.sampling_logprobs.item()) == (2, 0.0)


def test_bfloat16_logits_are_sampled_in_float32():
    rng = np.random.default_rng(3)
    half = mx.array(rng.normal(0, 2, (4, 500)).astype(np.float32)).astype(mx.bfloat16)
    rows = [RowSampling(SamplingParams(seed=s, top_p=0.9, top_logprobs=2), sampling_logprobs=True) for s in range(4)]
    plan = plan_sampling(rows, 500)
    low, full = sample(half, plan, [0] * 4), sample(half.astype(mx.float32), plan, [0] * 4)
    assert all(mx.array_equal(a, b) for a, b in zip(low.arrays(), full.arrays(), strict=True))
    assert low.reported.logprobs.dtype == low.sampling_logprobs.dtype == mx.float32
