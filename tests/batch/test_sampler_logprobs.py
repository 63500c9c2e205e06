"""The raw model's logprobs, and the distribution that drew the token: never mixed up."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.batch.distributions import log_normaliser, token_logprobs, token_ranks, top_logprobs
from mlx_parallm.batch.sampling import RowSampling, plan_sampling, sample
from mlx_parallm.core.candidates import TOP_LOGPROBS
from mlx_parallm.core.requests import SamplingParams


def log_softmax(logits):
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("vocab", [3, 100, 49152, 50257])
@pytest.mark.parametrize("scale", [0.1, 5.0])
def test_token_and_top_logprobs_equal_log_softmax(vocab, scale):
    logits = np.random.default_rng(vocab).normal(30, scale, (5, vocab)).astype(np.float32)
    expected = log_softmax(logits)
    tokens = np.array([0, 1, 2, vocab - 1, vocab // 2])
    x = mx.array(logits)
    normaliser = log_normaliser(x)
    got = token_logprobs(x, mx.array(tokens), normaliser)
    np.testing.assert_allclose(np.array(got), expected[np.arange(5), tokens], atol=1e-5)
    ids, best = top_logprobs(x, normaliser)
    k = min(TOP_LOGPROBS, vocab)
    assert np.array(ids).tolist() == np.argsort(-logits, axis=1, kind="stable")[:, :k].tolist()
    np.testing.assert_allclose(np.array(best), -np.sort(-expected, axis=1)[:, :k], atol=1e-5)


def test_equal_alternatives_come_in_order_of_id():
    logits = np.zeros((1, 2000), np.float32)
    logits[0, [1500, 3, 700]] = 2.0
    logits[0, 40] = 3.0
    x = mx.array(logits)
    ids, _ = top_logprobs(x, log_normaliser(x))
    assert ids[0, :4].tolist() == [40, 3, 700, 1500]
    assert len(set(ids[0].tolist())) == TOP_LOGPROBS


def test_a_rank_counts_the_better_tokens_and_ties_share_it():
    logits = np.random.default_rng(0).normal(0, 2, (3, 1000)).astype(np.float32)
    logits[1, [7, 8]] = 50.0
    tokens = np.array([500, 8, logits[2].argmin()])
    ranks = token_ranks(mx.array(logits), mx.array(tokens)).tolist()
    assert ranks == [1 + int((row > row[token]).sum()) for row, token in zip(logits, tokens, strict=True)]
    assert ranks[1:] == [1, 1000]


def test_banned_tokens_of_minus_infinity_do_not_disturb():
    logits = np.full((1, 400), -np.inf, np.float32)
    logits[0, [5, 399]] = [1.0, 0.0]
    x = mx.array(logits)
    ids, best = top_logprobs(x, log_normaliser(x))
    assert ids[0, :2].tolist() == [5, 399]
    np.testing.assert_allclose(best[0, :2].tolist(), [-0.31326, -1.31326], atol=1e-5)


def test_raw_logprobs_ignore_the_options_and_sampling_logprobs_follow_them():
    logits = np.array([[2.0, 1.0, 0.5, -1.0]] * 3, np.float32)
    odd = SamplingParams(temperature=0.5, top_k=2, seed=3, logit_bias=((1, 2.0),), top_logprobs=2)
    greedy = SamplingParams(temperature=0, top_logprobs=0)
    rows = [RowSampling(odd, sampling_logprobs=True), RowSampling(greedy), RowSampling(SamplingParams())]
    got = sample(mx.array(logits), plan_sampling(rows, 4), [0, 0, 0])
    tokens = got.tokens.tolist()
    raw = log_softmax(logits[0])
    np.testing.assert_allclose(got.reported.logprobs[:2].tolist(), raw[tokens[:2]], atol=1e-6)
    drawn_from = log_softmax(np.array([2.0, 3.0]) / 0.5)
    assert got.sampling_logprobs[0].item() == pytest.approx(drawn_from[tokens[0]], abs=1e-6)
    assert got.sampling_logprobs[1].item() == 0.0
    assert got.reported.top_ids[0, :2].tolist() == [0, 1]


def test_rows_that_did_not_ask_hold_nothing_that_could_be_taken_for_a_logprob():
    rows = [RowSampling(SamplingParams()), RowSampling(SamplingParams(top_logprobs=3))]
    got = sample(mx.zeros((2, 30)), plan_sampling(rows, 30), [0, 0])
    assert np.isnan(np.array(got.reported.logprobs)).tolist() == [True, False]
    assert np.isnan(np.array(got.reported.top_logprobs)).all(axis=1).tolist() == [True, False]
    assert got.sampling_logprobs is None


def test_logprobs_do_not_depend_on_neighbours():
    logits = mx.array(np.random.default_rng(8).normal(0, 3, (6, 49152)).astype(np.float32))
    rows = [RowSampling(SamplingParams(seed=i, top_logprobs=i if i % 2 else None)) for i in range(6)]
    together = sample(logits, plan_sampling(rows, 49152), [2] * 6)
    for i in (1, 3, 5):
        alone = sample(logits[i : i + 1], plan_sampling([rows[i]], 49152), [2])
        assert alone.reported.logprobs[0].item() == together.reported.logprobs[i].item()
        assert mx.array_equal(alone.reported.top_ids[0], together.reported.top_ids[i])
        assert mx.array_equal(alone.reported.top_logprobs[0], together.reported.top_logprobs[i])


def test_processed_logprobs_are_of_the_distribution_that_draws():
    """After penalties, bias, temperature and filters. A greedy row, which has no such distribution, has temperature 1;
    a row beside them keeps the raw model's."""
    logits = np.array([[2.0, 1.0, 0.5, -1.0]] * 3, np.float32)
    odd = SamplingParams(temperature=0.5, top_k=2, seed=3, logit_bias=((1, 2.0),), top_logprobs=3)
    rows = [
        RowSampling(replace(odd, processed_logprobs=True), sampling_logprobs=True),
        RowSampling(SamplingParams(temperature=0, top_p=0.1, top_logprobs=4, processed_logprobs=True)),
        RowSampling(odd),
    ]
    got = sample(mx.array(logits), plan_sampling(rows, 4), [0, 0, 0])
    raw, drawn_from = log_softmax(logits[0]), log_softmax(np.array([2.0, 3.0]) / 0.5)
    assert got.reported.top_ids[0, :2].tolist() == [1, 0]
    np.testing.assert_allclose(got.reported.top_logprobs[0, :2].tolist(), drawn_from[[1, 0]], atol=1e-6)
    assert got.reported.top_logprobs[0, 2].item() == -np.inf, "the filter drops it"
    assert got.reported.logprobs[0].item() == pytest.approx(got.sampling_logprobs[0].item(), abs=1e-6)
    np.testing.assert_allclose(got.reported.top_logprobs[1].tolist(), raw, atol=1e-6)
    np.testing.assert_allclose(got.reported.top_logprobs[2, :3].tolist(), raw[:3], atol=1e-6)


@pytest.mark.parametrize("wanted", [21, 700, 1000])
def test_a_row_with_many_candidates_changes_nothing_for_its_neighbours(wanted):
    logits = np.random.default_rng(9).normal(0, 3, (3, 1000)).astype(np.float32)
    few, many = RowSampling(SamplingParams(top_logprobs=5)), RowSampling(SamplingParams(top_logprobs=wanted))
    reported = sample(mx.array(logits), plan_sampling([few, many, few], 1000), [0] * 3).reported
    alone = sample(mx.array(logits[:1]), plan_sampling([few], 1000), [0]).reported
    assert mx.array_equal(alone.top_ids[0], reported.top_ids[0])
    ids, best = (np.array(part[0]) for part in reported.many[1])
    assert ids.tolist() == np.argsort(-logits[1], kind="stable")[:wanted].tolist()
    np.testing.assert_allclose(best, log_softmax(logits[1])[ids], atol=1e-5)
