"""The trainer against plain forwards and full-vocabulary gradients, on tiny float32 models."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from configs import changed, loss_config
from mlx.utils import tree_flatten
from sample_parts import (
    drawn_logprobs,
    with_advantage,
    with_logprobs_of,
    with_temperature,
)
from tiny import RECURRENT
from trainers import (
    SETTINGS,
    SINGLE,
    assert_close,
    assert_plain_logprobs,
    finish,
    gradients,
    learn,
    learning,
    leaves,
    lora_of,
    make_policy,
    make_trainer,
    plain_gradients,
    plain_logprobs,
    samples,
    snapshot,
    unclipped,
    with_logprobs,
)

from mlx_parallm.config import Algorithm, OldLogprobs
from mlx_parallm.train.data import UpdateBatch
from mlx_parallm.train.packing import split_samples

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "gemma3", "gemma3_text", *RECURRENT)
"""Of logprobs: these random models' logits reach ±70, where float32 is good for 4e-6 of them."""


# ---- logprobs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_logprobs_are_those_of_the_served_model(family: str, checkpointed: bool) -> None:
    """The prompt computed once, padding, position picking, head and fused cross-entropy, against plain forwards."""
    trainer, model = make_trainer(changed(SETTINGS, gradient_checkpointing=checkpointed), family, lora_of(family))
    policy = make_policy(trainer, moved=0.05)
    assert_plain_logprobs(trainer, model, policy, [with_temperature(sample, 0.7) for sample in samples()])


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_equal_those_of_a_full_log_softmax(family: str, checkpointed: bool) -> None:
    """−Σ A logπ / ΣT of plain forwards, differentiated by MLX itself through every logit."""
    settings = unclipped(gradient_checkpointing=checkpointed, loss=loss_config(algorithm=Algorithm.CROSS_ENTROPY))
    trainer, model = make_trainer(settings, family, lora_of(family))
    policy = make_policy(trainer, moved=0.05)
    drawn = samples(4)
    want = plain_gradients(trainer, model, policy, drawn)
    assert_close(gradients(trainer, policy, drawn), want, 1e-5)


@pytest.mark.parametrize("algorithm", SINGLE)
def test_gradients_do_not_depend_on_how_the_update_is_split(algorithm: Algorithm) -> None:
    settings = unclipped(loss=loss_config(algorithm=algorithm, clip_low=0.5, clip_high=0.5))
    whole, _, policy, drawn = learning(samples(7, groups=3), changed(settings, micro_batch_tokens=10_000))
    want = gradients(whole, policy, drawn)
    for most in (1, 30):
        split, _ = make_trainer(changed(settings, micro_batch_tokens=most))
        assert len(list(split_samples(drawn, most))) > 1
        assert_close(gradients(split, policy, drawn), want, 1e-5)
    assert_close(gradients(whole, policy, drawn[::-1]), want, 1e-5)


# ---- an update -----------------------------------------------------------------------------------


def test_at_the_first_step_the_ratio_is_one_and_nothing_is_clipped_and_kl_is_zero() -> None:
    trainer, model = make_trainer()
    policy = make_policy(trainer)
    metrics = learn(trainer, policy, with_logprobs(trainer, model, policy, samples())).metrics
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["entropy"] > 0


def kl(pairs) -> float:
    """Mean k3 over the tokens of (logprobs, other logprobs), sample by sample."""
    deltas = np.concatenate([np.subtract(other, ours) for ours, other in pairs])
    return float(np.mean(np.expm1(deltas) - deltas))


@pytest.mark.parametrize("known", [True, False])
def test_kl_to_the_base_is_that_of_the_policy_before_the_step(known: bool) -> None:
    trainer, model, policy, drawn = learning(samples(8), changed(SETTINGS, micro_batch_tokens=1000))
    expected = kl((drawn_logprobs(s), plain_logprobs(trainer, model, None, s)) for s in drawn)
    if not known:
        drawn = [replace(sample, sampling_logprobs=()) for sample in drawn]
    assert learn(trainer, policy, drawn).metrics["kl"] == pytest.approx(expected, rel=1e-3)


def test_every_factor_moves_by_the_second_update_and_the_base_never() -> None:
    """b has a gradient at once; a only once b is no longer zero."""
    trainer, model = make_trainer()
    policy = make_policy(trainer)
    base = {name: np.array(leaf) for name, leaf in tree_flatten(model.parameters())}
    arrays = {name: id(leaf) for name, leaf in tree_flatten(model.parameters())}
    start = leaves(policy)
    drawn = with_logprobs(trainer, model, policy, samples())
    learn(trainer, policy, drawn)
    learn(trainer, policy, drawn)
    assert all((leaf != start[name]).any() for name, leaf in leaves(policy).items())
    after = dict(tree_flatten(model.parameters()))
    assert {name: id(leaf) for name, leaf in after.items()} == arrays
    assert all(np.array_equal(np.array(leaf), base[name]) for name, leaf in after.items())


def test_a_half_precision_base_has_float32_masters_and_gradients() -> None:
    trainer, model = make_trainer(unclipped())
    model.set_dtype(mx.bfloat16)
    policy = make_policy(trainer, moved=0.05)
    outcome = learn(trainer, policy, samples())
    assert not outcome.skipped
    assert all(pair["a"].dtype == pair["b"].dtype == mx.float32 for pair in policy.params.values())
    assert all(leaf.dtype == np.float32 for leaf in gradients(trainer, policy, samples()).values())


def test_gradients_are_clipped_by_their_global_norm() -> None:
    settings = changed(SETTINGS, optimizer=changed(SETTINGS.optimizer, max_grad_norm=1e-3))
    trainer, _ = make_trainer(settings)
    policy = make_policy(trainer, moved=0.05)
    full = learn(trainer, policy, samples()).metrics["grad_norm"]
    clipped = gradients(trainer, make_policy(trainer, moved=0.05), samples())
    assert full > 1e-3
    assert np.sqrt(sum((leaf**2).sum() for leaf in clipped.values())) == pytest.approx(1e-3, rel=1e-4)


def test_a_batch_with_part_of_its_signal_makes_as_much_smaller_a_step() -> None:
    """Though AdamW's first step is of the same size whatever the gradient's; and its mean takes in as much less."""
    moved, means = {}, {}
    for scale in (1.0, 0.25):
        trainer, _ = make_trainer(unclipped())
        policy = make_policy(trainer, moved=0.05)
        before = leaves(policy)
        finish(trainer, trainer.begin(policy, UpdateBatch(tuple(samples()), step_scale=scale)))
        moved[scale] = np.concatenate([(leaf - before[name]).ravel() for name, leaf in leaves(policy).items()])
        state = snapshot(policy).optimizer
        means[scale] = np.concatenate([leaf.ravel() for name, leaf in state.items() if name.endswith(".m")])
    np.testing.assert_allclose(means[0.25], 0.25 * means[1.0], rtol=1e-5, atol=1e-9)
    assert np.linalg.norm(moved[0.25]) == pytest.approx(0.25 * np.linalg.norm(moved[1.0]), rel=1e-2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_is_skipped_and_leaves_no_trace(bad: float) -> None:
    trainer, _ = make_trainer()
    policy = make_policy(trainer, moved=0.05)
    learn(trainer, policy, samples())
    before, state = leaves(policy), snapshot(policy)
    drawn = samples()
    outcome = learn(trainer, policy, [with_advantage(drawn[0], bad), *drawn[1:]])
    assert outcome.skipped in ("loss_not_finite", "gradient_not_finite")
    assert outcome.step == policy.state.step == state.step
    assert all(np.array_equal(leaf, before[name]) for name, leaf in leaves(policy).items())
    after = snapshot(policy)
    assert all(np.array_equal(leaf, state.optimizer[name]) for name, leaf in after.optimizer.items())
    assert not learn(trainer, policy, drawn).skipped


def test_trainers_own_logprobs_as_old_ones_correct_for_the_sampler_up_to_the_cap() -> None:
    """π_old is the trainer's: ratio 1; μ is e^-1 of it at each token: weight min(e, 2) = 2."""
    loss = changed(SETTINGS.loss, old_logprobs=OldLogprobs.TRAINER)
    trainer, model = make_trainer(unclipped(loss=loss))
    policy = make_policy(trainer, moved=0.05)
    exact = with_logprobs(trainer, model, policy, samples())
    off = [with_logprobs_of(s, [p - 1.0 for p in drawn_logprobs(s)]) for s in exact]
    want = gradients(trainer, policy, exact)
    assert_close(gradients(trainer, policy, off), {name: 2.0 * leaf for name, leaf in want.items()}, 1e-4)
    assert learn(trainer, policy, off).metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("drawn_by", ["the policy", "an older one", "nobody knows"])
@pytest.mark.parametrize("most", [20, 1000])
def test_how_far_the_step_moved_is_measured_against_the_policy_before_it(drawn_by: str, most: int) -> None:
    trainer, model = make_trainer(changed(SETTINGS, micro_batch_tokens=most))
    policy = make_policy(trainer, moved=0.05)
    drawn = samples(8)  # with logprobs of nobody's: far from the policy's own
    if drawn_by == "the policy":
        drawn = with_logprobs(trainer, model, policy, drawn)
    elif drawn_by == "nobody knows":
        drawn = [replace(sample, sampling_logprobs=()) for sample in drawn]
    before = [plain_logprobs(trainer, model, policy.params, sample) for sample in drawn]
    metrics = learn(trainer, policy, drawn).metrics
    after = [plain_logprobs(trainer, model, policy.params, sample) for sample in drawn]
    of_each = [kl([pair]) for pair in zip(before, after, strict=True)]
    assert min(of_each) > 1e-5
    assert min(of_each) <= metrics["kl_step"] <= max(of_each), "an estimate from some of the samples"
    if most == 1000:
        assert metrics["kl_step"] == pytest.approx(kl(zip(before, after, strict=True)), rel=1e-3)
