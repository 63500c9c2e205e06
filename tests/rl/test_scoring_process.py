"""The scoring process: whatever a scorer does there costs its own group only."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from rl.scoring_rig import SHORT_S, file_of, gone, group

from mlx_parallm.core.requests import FinishReason
from mlx_parallm.rl.scoring.pool import ScoringError

# -- rewards ---------------------------------------------------------------------------------------


async def test_rewards_come_in_order(service):
    scoring = service()
    assert await scoring.score(group("exact", "a", "b", " a ", answer="a")) == (1, 0, 1)
    assert await scoring.score(group("math", "0.5", "2", answer="\\frac12")) == (1, 0)
    assert await scoring.score(group("size", "a", "", "abc")) == (1, 0, 3)
    assert await scoring.score([]) == ()


async def test_a_users_scorer_sees_the_sample_and_joins_sums(service):
    scoring = service()
    assert await scoring.score(group("seen", "x", bonus=10)) == (11,)
    assert await scoring.score(group("seen", "x", finish_reason=FinishReason.LENGTH, bonus=0.5)) == (2.5,)
    assert await scoring.score(group("2*size + 1*exact", "cat", "cow", answer="cat")) == (7, 6)


async def test_texts_of_any_kind_cross(service):
    texts = ["", "line\nline", "é\u2028𝄞", "\ud800", "\0", "x" * 300_000]
    assert await service().score(group("size", *texts)) == tuple(map(len, texts))


async def test_the_child_is_nice_and_has_neither_mlx_nor_a_blas(service):
    scoring = service()
    assert (await scoring.score(group("nice", "x")))[0] >= 10
    assert await scoring.score(group("mlx", "x")) == (0,)


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scorer", "text", "why"),
    [
        ("throws", "x", "no such thing"),
        ("exits", "x", "SystemExit"),
        ("not_finite", "nan", "finite"),
        ("not_finite", "-inf", "finite"),
        ("not_finite", "word", "could not convert"),
        ("word", "x", "str, not a number"),
        ("absent", "x", "absent"),
        ("exact", "x", "metadata.answer is missing"),
        ("1e300*size", "x" * 10, None),
        ("1e308*size", "x" * 10, "finite"),
    ],
)
async def test_a_scorer_that_fails_costs_its_group_and_keeps_the_child(scorer, text, why, service):
    scoring = service()
    before, bad, after, child = await asyncio.gather(
        *(
            scoring.score(g)
            for g in (group("pid", "x"), group(scorer, "1", text), group("size", "ab"), group("pid", "x"))
        ),
        return_exceptions=True,
    )
    assert after == (2,)
    assert child == before
    if why is None:
        assert bad == (1e300, 1e301)
    else:
        assert isinstance(bad, ScoringError)
        assert why in str(bad)
        assert str(bad).startswith(scorer)


@pytest.mark.parametrize("scorer", ["sleeps", "holds_the_gil"])
async def test_a_scorer_that_hangs_is_killed_and_others_of_its_batch_are_scored(scorer, service):
    scoring = service(SHORT_S)
    first = await scoring.score(group("pid", "x"))
    bad, after = await asyncio.gather(
        scoring.score(group(scorer, "x")), scoring.score(group("size", "ab")), return_exceptions=True
    )
    assert isinstance(bad, ScoringError)
    assert "took more than 2 s" in str(bad)
    assert after == (2,)
    assert await scoring.score(group("pid", "x")) != first
    with pytest.raises(ProcessLookupError):
        os.kill(int(first[0]), 0)


async def test_what_a_scorer_that_hangs_has_started_is_killed_too(service, tmp_path):
    with pytest.raises(ScoringError, match="took more than 2 s"):
        await service(SHORT_S).score(group("starts_another", "x", folder=str(tmp_path)))
    await asyncio.wait_for(gone(int(await file_of(tmp_path, "other"))), 20)


async def test_a_child_that_always_dies_is_given_up_after_a_second_try(service):
    scoring = service()
    bad, after = await asyncio.gather(
        scoring.score(group("vanishes", "x")), scoring.score(group("size", "ab")), return_exceptions=True
    )
    assert isinstance(bad, ScoringError)
    assert "died" in str(bad)
    assert after == (2,)


async def test_a_child_that_is_killed_in_the_middle_costs_nothing(service, tmp_path):
    scoring = service()
    scored = [
        asyncio.create_task(scoring.score(g)) for g in (group("waits", "x", folder=str(tmp_path)), group("size", "ab"))
    ]
    first = await file_of(tmp_path, "pid")
    (tmp_path / "pid").unlink()
    os.kill(int(first), signal.SIGKILL)
    assert await file_of(tmp_path, "pid") != first
    (tmp_path / "go").touch()
    assert await asyncio.gather(*scored) == [(7,), (2,)]


async def test_what_a_scorer_prints_is_no_answer(service):
    scoring = service()
    assert await scoring.score(group("prints", "a", "b")) == (1, 1)
    assert await scoring.score(group("size", "ab")) == (2,)


async def test_what_is_no_json_from_the_child_is_a_fault(service):
    scoring = service()
    bad, after = await asyncio.gather(
        scoring.score(group("vandal", "x")), scoring.score(group("size", "ab")), return_exceptions=True
    )
    assert isinstance(bad, ScoringError)
    assert "not an answer" in str(bad)
    assert after == (2,)


async def test_a_listener_that_goes_away_frees_its_process_and_disturbs_nobody(service, tmp_path):
    scoring = service()
    leaves = asyncio.create_task(scoring.score(group("waits", "x", folder=str(tmp_path))))
    stays = asyncio.create_task(scoring.score(group("size", "ab")))
    child = int(await file_of(tmp_path, "pid"))
    leaves.cancel()
    assert await stays == (2,)
    assert leaves.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


async def test_close_ends_the_child_and_fails_what_waits(service, tmp_path):
    scoring = service()
    waiting = asyncio.create_task(scoring.score(group("waits", "x", folder=str(tmp_path))))
    child = int(await file_of(tmp_path, "pid"))
    await scoring.close()
    with pytest.raises(ScoringError, match="closed"):
        await waiting
    with pytest.raises(ScoringError, match="closed"):
        await scoring.score(group("size", "x"))
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
