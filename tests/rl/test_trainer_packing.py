"""How an update is split, how its tokens lie, and what of them is padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from configs import changed
from trainers import (
    SETTINGS,
    assert_close,
    gradients,
    logprobs,
    make_policy,
    make_trainer,
    packed,
    plain_logprobs,
    samples,
    unclipped,
)

from mlx_parallm.rl.learn.packing import SampleBatch, split_samples
from mlx_parallm.rl.objectives.batches import Sample

UNEQUAL = (1, 2, 2, 3, 40, 41, 90, 200)


def group(lengths: Sequence[int], prompt: tuple[int, ...] = (1, 2, 3, 4, 5), number: int = 0) -> list[Sample]:
    """One prompt, completions of these lengths."""
    random = np.random.default_rng(number)
    return [
        Sample(
            prompt, tuple(map(int, random.integers(0, 250, length))), (-3.0,) * length, 1.0, (-1.0) ** length, number
        )
        for length in lengths
    ]


def size(drawn: Sequence[Sample]) -> int:
    return packed(drawn).tokens.size


def identities(parts: Sequence[SampleBatch]) -> list[int]:
    return sorted(id(sample) for part in parts for sample in part.samples)


def test_portions_hold_every_sample_once_and_keep_to_the_limit() -> None:
    drawn = samples(20, groups=3)
    parts = list(split_samples(drawn, 40))
    assert len(parts) > 2
    assert identities(parts) == sorted(map(id, drawn))
    for part in parts:
        assert part.size == size(part.samples)
        assert len(part.samples) == 1 or part.size <= 40
    assert list(split_samples(drawn[::-1], 40)) == parts


def test_a_portion_is_never_less_than_a_sample() -> None:
    drawn = samples(20, groups=3)
    assert [len(part.samples) for part in split_samples(drawn, 1)] == [1] * 20


def test_a_prompt_is_not_parted_where_it_fits_and_small_ones_share() -> None:
    """10 + 6 tokens each: two fit in 35, and a third begins the next portion."""
    prompts = [tuple(range(10 * at, 10 * at + 10)) for at in range(3)]
    drawn = [sample for at, prompt in enumerate(prompts) for sample in group((3, 3, 3), prompt, at)]
    parts = list(split_samples(drawn, 35))
    assert [{sample.group for sample in part.samples} for part in parts] == [{0, 1}, {2}]
    halves = list(split_samples(drawn, 15))
    assert [len(part.samples) for part in halves] == [2, 1] * 3


def test_samples_of_like_length_stand_together() -> None:
    """Each prompt once and next to no padding, though lengths differ two hundredfold."""
    drawn = group(UNEQUAL)
    batch = packed(drawn)
    exact = len(drawn[0].prompt_ids) + sum(len(sample.completion_ids) - 1 for sample in drawn)
    assert exact <= batch.tokens.size <= exact + 5
    assert [(bucket.rows, bucket.width) for bucket in batch.segments[0].buckets] == [(4, 2), (2, 40), (1, 89), (1, 199)]


@pytest.mark.parametrize("most", [200, 10_000])
def test_an_eighth_of_the_tokens_at_most_is_padding(most: int) -> None:
    """Where one width for the group would be padding for two fifths."""
    random = np.random.default_rng(1)
    lengths = [int(length) for length in random.integers(1, 120, 32)]
    parts = list(split_samples(group(lengths), most))
    segments = [segment for part in parts for segment in part.segments]
    used = sum(segment.tokens for segment in segments)
    padding = sum(bucket.padding for segment in segments for bucket in segment.buckets)
    assert used - padding == sum(length - 1 for length in lengths) + 5 * len(parts)
    assert padding <= 0.125 * used
    assert sum(len(segment.buckets) for segment in segments) <= 16 + len(parts)


def test_like_lengths_are_one_bucket() -> None:
    (segment,) = packed(group((11, 12, 12, 13))).segments
    assert [(bucket.rows, bucket.width) for bucket in segment.buckets] == [(4, 12)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_buckets_change_no_logprob(family: str, checkpointed: bool) -> None:
    """In any order, over a sliding window of 8 too."""
    trainer, model = make_trainer(changed(SETTINGS, gradient_checkpointing=checkpointed), family)
    policy = make_policy(trainer, moved=0.05)
    drawn = [*group((30, 1, 4, 30), number=1), *group((2, 25), (7, 8), 2)]
    batch = packed(drawn)
    assert len(batch.segments[0].buckets) > 1
    logp = logprobs(trainer, batch, policy.params, policy.scale)
    got = batch.padded(logp)
    for row, sample in enumerate(drawn):
        want = plain_logprobs(trainer, model, policy.params, sample)
        assert got[row, : len(want)].tolist() == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_buckets_change_no_gradient(checkpointed: bool) -> None:
    """Against one sample a micro-step, where there is nothing to share and no padding."""
    settings = unclipped(gradient_checkpointing=checkpointed)
    drawn = [*group((20, 2, 5, 21)), *group((1, 12), (9, 9, 9), 1)]
    together, _ = make_trainer(changed(settings, micro_batch_tokens=10_000))
    policy = make_policy(together, moved=0.05)
    alone, _ = make_trainer(changed(settings, micro_batch_tokens=1, gradient_checkpointing=False))
    assert_close(gradients(together, policy, drawn), gradients(alone, policy, drawn), 1e-5)
