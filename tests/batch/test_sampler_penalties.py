"""Penalties over counts that stay on the device."""

import io

import mlx.core as mx
import numpy as np
import pytest
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


def test_counts_follow_their_row_through_joins_and_leaves():
    logits = mx.array(np.random.default_rng(1).normal(0, 1, (1, 9)).astype(np.float32))
    params = SamplingParams(seed=4, frequency_penalty=1.5)
    alone = RowSampling(params, counts=TokenCounts(PROMPT, (), 9))
    solo = [sample(logits, plan_sampling([alone], 9), [step]).tokens.item() for step in range(9)]

    mine = RowSampling(params, counts=TokenCounts(PROMPT, (), 9))
    other = RowSampling(SamplingParams(presence_penalty=2.0), counts=TokenCounts((), (), 9))
    plain = RowSampling(SamplingParams())
    batches = [[mine], [plain, mine], [other, plain, mine], [mine, other]]
    moved = []
    for step in range(9):
        rows = batches[step % 4]
        tokens = sample(mx.repeat(logits, len(rows), 0), plan_sampling(rows, 9), [step] * len(rows)).tokens
        moved.append(tokens[rows.index(mine)])
    assert [token.item() for token in moved] == solo


def test_a_recomputed_row_goes_on_where_it_was():
    logits = mx.array(np.random.default_rng(2).normal(0, 1, (1, 9)).astype(np.float32))
    params = SamplingParams(seed=9, presence_penalty=0.5, repetition_penalty=1.3, top_p=0.9)
    row = RowSampling(params, counts=TokenCounts(PROMPT, (), 9))
    tokens = [sample(logits, plan_sampling([row], 9), [step]).tokens.item() for step in range(8)]
    again = RowSampling(params, counts=TokenCounts(PROMPT, tokens[:5], 9))
    assert [sample(logits, plan_sampling([again], 9), [s]).tokens.item() for s in range(5, 8)] == tokens[5:]


def test_a_prompt_token_is_repeated_but_not_present():
    logits = mx.array([[0.0, 1.0, 0.9, -0.5, -1.0]])
    only_prompt = TokenCounts((1,), (), 5)
    presence = RowSampling(SamplingParams(temperature=0, presence_penalty=2.0), counts=only_prompt)
    assert sample(logits, plan_sampling([presence], 5), [0]).tokens.item() == 1
    repetition = RowSampling(SamplingParams(temperature=0, repetition_penalty=2.0), counts=TokenCounts((1,), (), 5))
    assert sample(logits, plan_sampling([repetition], 5), [0]).tokens.item() == 2


def test_repetition_pushes_negative_logits_further_down():
    logits = mx.array([[-1.0, -1.5]])
    row = RowSampling(SamplingParams(temperature=0, repetition_penalty=2.0), counts=TokenCounts((0,), (), 2))
    assert sample(logits, plan_sampling([row], 2), [0]).tokens.item() == 1


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=0.3, top_k=4), False),
        (SamplingParams(presence_penalty=-0.1), True),
        (SamplingParams(frequency_penalty=0.1), True),
        (SamplingParams(repetition_penalty=0.9), True),
    ],
)
def test_which_rows_need_counts(params, expected):
    assert has_penalties(params) is expected


def test_the_tokens_of_all_rows_are_counted_by_one_scatter():
    params = [SamplingParams(presence_penalty=0.5, repetition_penalty=1.1)] * 8
    penalties = Penalties(params, [TokenCounts(PROMPT, (), 12) for _ in params], list(range(8)), 9)
    penalties.count(mx.arange(9, dtype=mx.uint32))
    dot = io.StringIO()
    mx.export_to_dot(dot, penalties.apply(mx.zeros((9, 12)), np.zeros(9, np.int64)))
    assert dot.getvalue().count("Scatter") == 2, "one counts, and one puts the penalised rows back among the others"


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
