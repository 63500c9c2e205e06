"""Allowed tokens and bad words: what may not be drawn, beside rows that may draw anything."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.batch.sampling import BadWords, RowSampling, plan_sampling, sample
from mlx_parallm.core.requests import SamplingParams

VOCAB = 20


def mask(*allowed):
    bits = np.zeros(-(-VOCAB // 8) * 8, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def row(words=(), written=(), prompt_length=0, **params):
    bad = BadWords(words, list(written), prompt_length) if words else None
    return RowSampling(SamplingParams(**params), bad_words=bad)


def drawn(rows, logits=None, position=0):
    logits = mx.arange(VOCAB, dtype=mx.float32) if logits is None else mx.array(logits)
    plan = plan_sampling(rows, VOCAB)
    return sample(mx.stack([logits] * len(rows)), plan, [position] * len(rows)).tokens.tolist()


def test_only_allowed_tokens_are_drawn_and_neighbours_are_free():
    greedy = {"temperature": 0.0}
    assert drawn([row(**greedy), row(allowed_tokens=mask(3, 11), **greedy), row(**greedy)]) == [19, 11, 19]
    rows = [row(allowed_tokens=mask(3, 11), temperature=2.0, seed=seed) for seed in range(40)]
    assert set(drawn(rows, [0.0] * VOCAB)) == {3, 11}


def test_logprobs_of_the_drawn_distribution_know_what_is_allowed():
    params = {"allowed_tokens": mask(3, 11), "top_logprobs": 3, "processed_logprobs": True}
    plan = plan_sampling([row(**params)], VOCAB)
    got = sample(mx.zeros((1, VOCAB)), plan, [0])
    assert got.reported.logprobs.item() == pytest.approx(np.log(0.5), abs=1e-6)
    assert sorted(got.reported.top_ids[0, :2].tolist()) == [3, 11]
    assert got.reported.top_logprobs[0, 2].item() == -np.inf


@pytest.mark.parametrize(
    ("words", "written", "prompt_length", "expected"),
    [
        (((19,),), (), 0, 18),
        (((19,), (18,)), (), 0, 17),
        (((5, 19),), (5,), 0, 18),
        (((5, 19),), (6,), 0, 19),
        (((5, 19),), (5,), 1, 19),
        (((4, 5, 19),), (4, 5), 0, 18),
        (((4, 5, 19),), (1, 4, 5), 1, 18),
        (((4, 5, 19),), (4, 5), 1, 19),
        (((5, 19), (4, 5, 18)), (4, 5), 0, 17),
    ],
    ids=[
        "one token",
        "two words",
        "after its beginning",
        "after something else",
        "the prompt does not count",
        "three tokens",
        "after a prompt",
        "begun in the prompt",
        "two words that end alike",
    ],
)
def test_the_last_token_of_a_bad_word_is_not_drawn(words, written, prompt_length, expected):
    greedy = row(words, written, prompt_length, temperature=0.0)
    assert drawn([greedy, row(temperature=0.0)]) == [expected, 19]


def test_a_row_that_could_draw_nothing_else_may_draw_a_bad_word():
    only = row(((7,),), temperature=0.0, allowed_tokens=mask(7))
    other = row(((7,),), temperature=0.0, allowed_tokens=mask(7, 8))
    assert drawn([only, other]) == [7, 8]
