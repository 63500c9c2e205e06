"""How an update is split, how its tokens lie, and what of them is padding."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from configs import changed, loss_config
from mlx.utils import tree_flatten
from trainers import (
    SETTINGS,
    all_buckets,
    assert_close,
    assert_plain_logprobs,
    everywhere,
    gradients,
    learn,
    make_policy,
    make_trainer,
    packed,
    samples,
    unclipped,
)

from mlx_parallm.config import Algorithm
from mlx_parallm.train.context import Params
from mlx_parallm.train.data import Datum, SampledSpan, answered
from mlx_parallm.train.packing import SampleBatch, split_samples


def group(lengths: Sequence[int], prompt: tuple[int, ...] = (1, 2, 3, 4, 5), number: int = 0) -> list[Datum]:
    """One prompt, completions of these lengths."""
    random = np.random.default_rng(number)
    return [
        answered(
            prompt, list(map(int, random.integers(0, 250, length))), (-3.0,) * length, 1.0, (-1.0) ** length, number
        )
        for length in lengths
    ]


def size(drawn: Sequence[Datum]) -> int:
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
    assert [part.samples for part in split_samples(drawn[::-1], 40)] == [part.samples for part in parts]


def test_a_prompt_is_not_parted_where_it_fits_and_small_ones_share() -> None:
    """10 + 6 tokens each: two fit in 35, and a third begins the next portion."""
    prompts = [tuple(range(10 * at, 10 * at + 10)) for at in range(3)]
    drawn = [sample for at, prompt in enumerate(prompts) for sample in group((3, 3, 3), prompt, at)]
    parts = list(split_samples(drawn, 35))
    assert [{sample.group for sample in part.samples} for part in parts] == [{0, 1}, {2}]
    halves = list(split_samples(drawn, 15))
    assert [len(part.samples) for part in halves] == [2, 1] * 3


@pytest.mark.parametrize("most", [200, 10_000])
def test_an_eighth_of_the_tokens_at_most_is_padding(most: int) -> None:
    """Where one width for the group would be padding for two fifths."""
    random = np.random.default_rng(1)
    lengths = [int(length) for length in random.integers(1, 120, 32)]
    parts = list(split_samples(group(lengths), most))
    buckets = [bucket for part in parts for bucket in all_buckets(part.branch)]
    used, padding = sum(part.size for part in parts), sum(bucket.padding for bucket in buckets)
    assert used - padding == sum(length - 1 for length in lengths) + 5 * len(parts)
    assert padding <= 0.125 * used
    assert len(buckets) <= 16 + len(parts)


@pytest.fixture(params=["by parts", "together"])
def attending(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention as on a CPU, and as on a GPU."""
    monkeypatch.setattr("mlx_parallm.train.attention.on_cpu", lambda: request.param == "by parts")


@pytest.mark.usefixtures("attending")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_buckets_change_no_gradient(checkpointed: bool) -> None:
    """Against one sample a micro-step, where there is nothing to share and no padding."""
    settings = unclipped(gradient_checkpointing=checkpointed)
    drawn = [*group((20, 2, 5, 21)), *group((1, 12), (9, 9, 9), 1)]
    together, _ = make_trainer(changed(settings, micro_batch_tokens=10_000))
    policy = make_policy(together, moved=0.05)
    alone, _ = make_trainer(changed(settings, micro_batch_tokens=1, gradient_checkpointing=False))
    assert_close(gradients(together, policy, drawn), gradients(alone, policy, drawn), 1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("scores", [1, 200, 1500])
def test_long_rows_attend_in_blocks_and_nothing_else_changes(
    family: str, checkpointed: bool, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one query, of some queries of a row, and of several rows; over a sliding window of 8 too."""
    settings = unclipped(gradient_checkpointing=checkpointed, micro_batch_tokens=10_000)
    drawn = [*group((30, 2, 2, 17, 31), tuple(range(22))), *group((1, 12), (9, 9, 9), 1)]
    trainer, model = make_trainer(settings, family)
    policy = make_policy(trainer, moved=0.05)
    want = gradients(trainer, policy, drawn)
    monkeypatch.setattr("mlx_parallm.train.attention.SCORES_AT_ONCE", scores)
    assert_close(gradients(trainer, policy, drawn), want, 3e-5)
    assert_plain_logprobs(trainer, model, policy, drawn)


@pytest.mark.slow
def test_the_memory_of_a_long_row_does_not_grow_with_the_square_of_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as many tokens take about four times the memory, where all scores at once take far more."""
    monkeypatch.setattr("mlx_parallm.train.attention.SCORES_AT_ONCE", 1 << 16)

    def peak(tokens: int) -> int:
        settings = changed(SETTINGS, micro_batch_tokens=10_000, gradient_checkpointing=True)
        trainer, _ = make_trainer(settings, measure_kl=False, num_attention_heads=16, num_key_value_heads=16)
        trainer.pace(1e9)
        policy = make_policy(trainer)
        learn(trainer, policy, group((2,), tuple(at % 250 for at in range(tokens))))
        return trainer.pacer.pass_bytes

    short, long = peak(500), peak(2000)
    assert long < 5 * short
    monkeypatch.setattr("mlx_parallm.train.attention.SCORES_AT_ONCE", 1 << 30)
    assert peak(2000) > 5 * long


# ---- several turns -------------------------------------------------------------------------------


def episodes(seed: int = 0) -> list[Datum]:
    """A group of five episodes: system and user, a drawn turn, a tool's result, and another drawn turn.

    Three share the first turn and its result. Every drawn token has an advantage of its own, some a weight of their
    own, and the second turn is drawn at another temperature.
    """
    random = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return [int(token) for token in random.integers(0, 250, count)]

    prompt, shared = ids(9), (ids(7), ids(6))
    made = []
    for number in range(5):
        turn, result = shared if number < 3 else (ids(3 + number), ids(4))
        last = ids(2 + 3 * number)
        weights = [0.0] * 9 + [1.0] * len(turn) + [0.0] * len(result) + [0.5 + number / 4] * len(last)
        first, second = 9 + len(turn), 9 + len(turn) + len(result)
        made.append(
            Datum(
                tuple(prompt + turn + result + last),
                tuple(weights),
                tuple(random.normal(size=len(weights)).tolist()),
                tuple((-3.0 + random.normal(size=len(weights)) / 10).tolist()),
                sampled=(SampledSpan(9, first, 0.7), SampledSpan(second, len(weights), 1.3)),
            )
        )
    return made


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_of_turns_equal_those_of_plain_forwards(family: str, checkpointed: bool) -> None:
    """Of the sum of -weight · π/μ · advantage, differentiated by MLX itself, over one sample after the other."""
    settings = unclipped(
        gradient_checkpointing=checkpointed,
        micro_batch_tokens=10_000,
        loss=loss_config(algorithm=Algorithm.IMPORTANCE_SAMPLING, ratio_cap=1e9),
    )
    trainer, model = make_trainer(settings, family)
    policy = make_policy(trainer, moved=0.05)
    drawn = episodes()

    def plain(params: Params) -> mx.array:
        value = mx.array(0.0)
        for sample in drawn:
            with trainer.model.bank.using(everywhere(params, policy.scale)):
                logits = model(mx.array([sample.token_ids]))[0, :-1] / mx.array(sample.temperatures()[1:])[:, None]
            logp = logits - mx.logsumexp(logits, -1, keepdims=True)
            logp = mx.take_along_axis(logp, mx.array(sample.token_ids[1:])[:, None], -1).squeeze(-1)
            ratio = mx.exp(logp - mx.array(sample.sampling_logprobs[1:]))
            value = value - (ratio * mx.array(sample.advantages[1:]) * mx.array(sample.loss_weights[1:])).sum()
        return value

    want = {name: np.array(leaf) for name, leaf in tree_flatten(mx.grad(plain)(policy.params))}
    assert_close(gradients(trainer, policy, drawn), want, 1e-5)
