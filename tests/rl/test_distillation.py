"""Logprobs of a teacher, and the loss that imitates it."""

from __future__ import annotations

import asyncio
import math

import mlx.core as mx
import numpy as np
import pytest
from configs import loss_config
from extras.engines.engine_server import serving
from sample_parts import drawn_logprobs
from trainers import (
    assert_close,
    gradients,
    gradients_of,
    lazy_logprobs,
    make_policy,
    make_trainer,
    samples,
    unclipped,
    with_logprobs,
)

from mlx_parallm.config import Algorithm, RLTrainingConfig
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import EngineError
from mlx_parallm.extras.engines.http import EngineServer
from mlx_parallm.extras.engines.teacher import server_score
from mlx_parallm.rl.objectives import ScoredGroup, prepare
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.teachers import Teacher
from mlx_parallm.rl.teachers import taught as taught_batch
from mlx_parallm.rl.trajectories import Episode
from mlx_parallm.train.context import Params
from mlx_parallm.train.data import Datum, UpdateBatch, answered

DISTILLATION = loss_config(Algorithm.DISTILLATION)


def taught(drawn: list[Datum], seed: int = 0) -> list[Datum]:
    """With random logprobs of a teacher."""
    random = np.random.default_rng(seed)
    return [sample.with_teacher(random.uniform(-4, -1, len(sample.trained())).tolist()) for sample in drawn]


def test_the_gradient_is_that_of_the_reverse_kl_at_the_drawn_tokens() -> None:
    """-Σ (log π_teacher - log π_old) π/π_old / ΣT of plain forwards, differentiated by MLX itself."""
    trainer, model = make_trainer(unclipped(loss=DISTILLATION))
    policy = make_policy(trainer, moved=0.05)
    drawn = taught(with_logprobs(trainer, model, policy, samples(4)))
    total = sum(len(sample.trained()) for sample in drawn)

    def plain(params: Params) -> mx.array:
        value = mx.array(0.0)
        for sample in drawn:
            logp = lazy_logprobs(trainer, model, params, sample)
            old = mx.array(drawn_logprobs(sample))
            teacher = mx.array([sample.teacher_logprobs[at] for at in sample.trained()])
            value = value - ((teacher - old) * mx.exp(logp - old)).sum() / total
        return value

    assert_close(gradients(trainer, policy, drawn), gradients_of(plain, policy), 1e-5)


@pytest.mark.parametrize(
    ("teacher", "problem"),
    [
        ({}, "needs a teacher"),
        ({"timeout_s": 3}, "needs a teacher"),
        ({"url": "http://a"}, "url needs model"),
        ({"url": "a", "model": "m"}, "url must begin with"),
        ({"url": "http://a", "model": "m", "adapter": "tone"}, "name two teachers"),
        ({"adapter": "tone", "model": "m"}, "set url too"),
    ],
)
def test_what_is_no_teacher_is_refused_at_start(teacher: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RLTrainingConfig(algorithm="distillation", teacher=teacher)


SAMPLES = [answered((1, 2, 3), (4, 5), (-1.0, -2.0)), answered((1, 9), (7,), (-1.0,))]


async def test_the_teacher_reads_its_own_text_before_the_prompt_and_behind_the_first_token_of_a_text() -> None:
    asked = []

    async def score(ids: tuple[int, ...], first: int) -> list[float | None]:
        asked.append(ids)
        return [None if at < first else -float(token) for at, token in enumerate(ids)]

    found, problem = await Teacher(score, 1.0, prompt_ids=(50, 51)).logprobs(SAMPLES)
    assert (asked, problem) == ([(50, 51, 1, 2, 3, 4, 5), (50, 51, 1, 9, 7)], "")
    assert found == ((-4, -5), (-7,))
    asked.clear()
    found, _ = await Teacher(score, 1.0, prompt_ids=(50, 51), bos_id=1).logprobs(SAMPLES)
    assert asked == [(1, 50, 51, 2, 3, 4, 5), (1, 50, 51, 9, 7)]
    assert found == ((-4, -5), (-7,))


@pytest.mark.parametrize("fault", ["slow", "fails", "short", "none", "nan"])
async def test_a_teacher_that_fails_costs_only_the_samples_that_it_could_not_read(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def score(ids: tuple[int, ...], first: int) -> list[float | None]:
        if ids[1] != 9:
            return [None] + [-0.5] * (len(ids) - 1)
        if fault == "fails":
            raise EngineError("gone")
        if fault == "slow":
            await asyncio.sleep(60)
        return {"short": [None, -1.0], "none": [None, -1.0, None], "nan": [None, -1.0, math.nan]}[fault]

    found, problem = await Teacher(score, 0.5).logprobs(SAMPLES)
    assert found == ((-0.5, -0.5), ())
    batch = taught_batch(UpdateBatch(tuple(SAMPLES), step_scale=0.5), found)
    assert [each.teacher_logprobs for each in batch.samples] == [(0, 0, 0, -0.5, -0.5)]
    assert batch.step_scale == 0.25
    assert problem
    assert f"1 of 2 samples are left out: {problem}" in caplog.text


def entries(*pairs: tuple[int, float]) -> list[object]:
    """`prompt_logprobs` as vLLM writes it: by token id."""
    return [None, *({str(token): {"logprob": value, "rank": 1, "decoded_token": "x"}} for token, value in pairs)]


@pytest.mark.parametrize(
    ("status", "answer", "problem"),
    [
        (200, entries((2, -0.1), (3, -0.2), (4, -0.3), (5, -0.4)), ""),
        (200, entries((2, -0.1), (3, -0.2), (4, -0.3), (6, -0.4)), "for the token 5: it may have another tokenizer"),
        (200, entries((2, -0.1)), "no prompt_logprobs for each token"),
        (200, None, "no prompt_logprobs for each token"),
        (500, None, "answered /v1/completions with 500"),
    ],
)
async def test_another_server_teaches_by_the_log_probabilities_of_a_prompt(
    status: int, answer: object, problem: str
) -> None:
    body = {"choices": [{"index": 0, "text": "", "prompt_logprobs": answer}]}
    with serving([("POST /v1/completions", status, body)]) as other:
        server = EngineServer("teacher's", f"{other.url}/v1", "secret", 5.0)
        (logprobs,), found = await Teacher(server_score(server, "big"), 5.0, close=server.close).logprobs(SAMPLES[:1])
        await server.close()
    assert problem in found
    assert logprobs == (() if problem else (-0.3, -0.4))
    (_, asked), *_ = other.asked
    assert (asked["model"], asked["prompt"], asked["prompt_logprobs"]) == ("big", [[1, 2, 3, 4, 5]], 0)
    assert other.keys == ["Bearer secret"]


def test_every_sample_is_learnt_from_whatever_its_reward_and_also_without_one() -> None:
    one = Episode((GivenTrajectory((1,), (2, 3)),))
    groups = [ScoredGroup((one, one), (1.0, 1.0), "s"), ScoredGroup((one,), (), "s")]
    prepared = prepare(groups, DISTILLATION, RewardHistory())
    assert len(prepared.batch.samples) == 3
    assert prepared.batch.step_scale == 1.0
    assert prepared.drop_reasons == (None, None)
