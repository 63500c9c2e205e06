"""Penalties over counts that stay on the device."""

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.batch.sampling import Penalties, RowSampling, TokenCounts, has_penalties, plan_sampling, sample
from mlx_parallm.core.requests import SamplingParams

PROMPT = (1, 1, 4)


def penalised(logits, params, generated):
    """vLLM's arithmetic for one row."""
    counts = np.bincount(np.array(generated, int), minlength=len(logits))
    seen = counts > 0
    seen[list(PROMPT)] = True
    x = np.where(
        seen, np.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty), logits
    )
    return x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


OPTIONS = [
    SamplingParams(temperature=0, presence_penalty=0.7),
    SamplingParams(temperature=0, frequency_penalty=0.3),
    SamplingParams(temperature=0, repetition_penalty=1.5),
    SamplingParams(temperature=0, presence_penalty=-0.4, frequency_penalty=0.45, repetition_penalty=1.2),
]


def test_lazy_steps_count_every_token_they_draw():
    """Twelve steps are launched before the first is read; each sees what those before it drew."""
    logits = np.random.default_rng(0).normal(0, 1, (len(OPTIONS) + 1, 12)).astype(np.float32)
    rows = [RowSampling(p, counts=TokenCounts(PROMPT, (), 12)) for p in OPTIONS]
    rows.insert(2, RowSampling(SamplingParams(temperature=0)))
    plan = plan_sampling(rows, 12)
    launched = [sample(mx.array(logits), plan, [step] * len(rows)).tokens for step in range(12)]
    drawn = np.array(mx.stack(launched))
    for number, row in enumerate(rows):
        generated = []
        for _ in range(12):
            generated.append(int(penalised(logits[number], row.params, generated).argmax()))
        assert drawn[:, number].tolist() == generated
    assert len(set(drawn[:, 0].tolist())) > 1


def test_a_recomputed_row_goes_on_where_it_was():
    logits = mx.array(np.random.default_rng(2).normal(0, 1, (1, 9)).astype(np.float32))
    params = SamplingParams(seed=9, presence_penalty=0.5, repetition_penalty=1.3, top_p=0.9)
    row = RowSampling(params, counts=TokenCounts(PROMPT, (), 9))
    tokens = [sample(logits, plan_sampling([row], 9), [step]).tokens.item() for step in range(8)]
    again = RowSampling(params, counts=TokenCounts(PROMPT, tokens[:5], 9))
    assert [sample(logits, plan_sampling([again], 9), [s]).tokens.item() for s in range(5, 8)] == tokens[5:]


options = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, -1.5, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
)


@settings(max_examples=40, deadline=None)
@given(
    params=st.lists(options, min_size=1, max_size=5),
    batches=st.lists(st.lists(st.integers(0, 4), unique=True, max_size=5), min_size=1, max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_penalties_are_numpys_in_every_batch_a_row_is_in(params, batches, seed):
    """Rows join, leave and come back in any order; a plan lasts for one to three steps."""
    rng = np.random.default_rng(seed)
    counts, generated = [TokenCounts(PROMPT, (), 10) for _ in params], [[] for _ in params]
    for batch in batches:
        present = [row for row in batch if row < len(params)]
        chosen = [place for place, row in enumerate(present) if has_penalties(params[row])]
        if not chosen:
            continue
        rows = [present[place] for place in chosen]
        plan = Penalties([params[row] for row in rows], [counts[row] for row in rows], chosen, len(present))
        for _ in range(rng.integers(1, 4)):
            logits = rng.normal(0, 2, (len(present), 10)).astype(np.float32)
            got = np.array(plan.apply(mx.array(logits), np.zeros(len(logits), np.int64)))
            for place, row in enumerate(present):
                want = penalised(logits[place], params[row], generated[row]) if place in chosen else logits[place]
                np.testing.assert_allclose(got[place], want, rtol=1e-5, atol=1e-5)
            tokens = rng.integers(0, 10, len(present))
            plan.count(mx.array(tokens.astype(np.uint32)))
            for row, token in zip(present, tokens, strict=True):
                generated[row].append(int(token))
