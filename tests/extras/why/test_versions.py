"""What is said of versions: the updates of the past as they were, keys, settings, and what is not known any more."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from configs import changed
from hypothesis import given, settings
from hypothesis import strategies as st
from rl.service_rig import GIVEN, World
from rl.test_recovery import MANUAL, Run, did, finished_update
from server.fakes import ByteTokenizer

from mlx_parallm.core.readers import EVERYTHING, Reader
from mlx_parallm.core.requests import Signal
from mlx_parallm.errors import InvalidRequestError, UnknownModelError
from mlx_parallm.extras.why.cards import WhyVersion
from mlx_parallm.extras.why.service import Why
from mlx_parallm.rl.runs.records import CHANGED
from mlx_parallm.train.data import UpdateSettings

STEPS = ["request", "people", "alone", "feedback", "tokens", "update", "given", "draft", "single", "dull", "withheld"]


async def why(
    one: World, version: str | None = None, update: int | None = None, reader: Reader = EVERYTHING
) -> WhyVersion:
    return await Why(one.service, ByteTokenizer()).version(version, update, 100, reader)


@given(st.lists(st.sampled_from([*STEPS, "save", "rollback"]), max_size=16), st.sampled_from([0.6, 1.0]))
@settings(max_examples=40, deadline=None)
def test_the_samples_of_past_updates_are_those_that_were_learnt_from(
    tmp_path_factory, steps: list[str], most: float
) -> None:
    async def check() -> None:
        limited = changed(MANUAL, loss=changed(MANUAL.loss, max_share_per_key=most))
        run = Run(tmp_path_factory.mktemp("run") / "journal.sqlite", limited)
        async with run.process() as one:
            for step in steps:
                await did(one, step, run)
            service = Why(one.service, ByteTokenizer())
            history = await service.history(None, EVERYTHING)
            updates = [change for change in history.changes if getattr(change.body, "status", "") in CHANGED]
            history = replace(history, found=replace(history.found, updates=tuple(updates)))
            past = [each async for each in service.past(history)]
            learnt = [batch.samples for batch in one.learner.batches if batch.samples]
            made = [tuple(datum for sample in each.samples for datum in sample.data) for each in past]
            assert [samples for samples in made if samples in learnt] == made
            assert len(made) == len(updates)
            for each in past:
                assert sum(sample.share for sample in each.samples) == pytest.approx(1.0)

    asyncio.run(check())


async def test_a_version_consists_of_its_updates_with_their_samples(tmp_path: Path) -> None:
    async with Run(tmp_path / "journal.sqlite").process() as one:
        await one.request()
        await finished_update(one)
        await one.service.update(given=GIVEN, publish=False)
        await one.service.update(given=GIVEN)
        first, second = await why(one, "main@1"), await why(one, "main")
        assert (first.version, first.start, first.updates_total, first.trajectories) == ("main@1", "", 1, 2)
        assert [update.version for update in second.updates] == ["main@2", None, "main@1"]
        assert [update.reward_mean for update in second.updates] == [0.5, 0.5, 0.5]
        (update,) = (await why(one, "main@2", second.updates[-1].number)).updates
        best, worst = update.samples
        assert (best.trajectory_id, best.reward, best.advantage, best.share) == ("traj-r1-0", 1.0, 0.5, 0.5)
        assert (worst.trajectory_id, worst.reward, worst.advantage, worst.scoring_function) == (
            *("traj-r1-1", 0.0, -0.5, "exact"),
        )
        assert second.settings["loss.algorithm"] == str(MANUAL.loss.algorithm.value)
        with pytest.raises(InvalidRequestError, match="no update 99"):
            await why(one, "main@2", 99)
        for unknown in ("main@9", "other@1"):
            with pytest.raises(UnknownModelError):
                await why(one, unknown)


async def test_settings_that_changed_are_named(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        await one.service.update(given=GIVEN)
        await one.service.save(None, None, [], {})
    run.training = changed(MANUAL, learning_rate=0.25)
    async with run.process() as one:
        await one.service.update(given=GIVEN)
        newest, oldest = (await why(one)).updates
        assert dict(newest.changed_settings) == {"optimizer.learning_rate": 0.25}
        assert dict(oldest.changed_settings) == {}


async def test_trajectories_of_other_keys_are_counted_and_not_named(tmp_path: Path) -> None:
    one_key, other = (tuple(replace(each, owner=key) for each in GIVEN) for key in ("ann", "bob"))
    async with Run(tmp_path / "journal.sqlite").process() as one:
        one.learner.metrics["learning_rate"] = 0.1
        report = await one.service.update(given=[*one_key, *(replace(each, group_id="b") for each in other)])
        number = (await why(one)).updates[0].number
        everything, seen = await why(one, None, number), await why(one, None, number, Reader("bob"))
        assert report.status == "published"
        assert {part.key: (part.trajectories, part.share) for part in everything.keys} == {
            "ann": (2, 0.5),
            "bob": (2, 0.5),
        }
        assert {part.key: (part.trajectories, part.share) for part in seen.keys} == {None: (2, 0.5), "bob": (2, 0.5)}
        (update,) = seen.updates
        assert [(sample.key, bool(sample.answer)) for sample in update.samples if not sample.readable] == [
            *((None, False),) * 2,
        ]
        assert {sample.key for sample in update.samples if sample.readable} == {"bob"}
        with pytest.raises(UnknownModelError):
            await why(one, "main", reader=Reader("bob", sees=lambda name: name == "theirs"))


async def test_what_a_compaction_has_removed_is_said(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    run.keep = 0
    async with run.process() as one:
        await one.request()
        await finished_update(one)
        await one.service.save(None, None, [], {})
        while one.service.parts.journal._compacting is not None:
            await one.service.parts.journal._compacting
        found = await why(one)
        (update,) = found.updates
        assert (update.trajectories, update.keys, update.reward_mean) == (None, [], 0.5)
        assert "removed from the journal" in update.problem
        assert (found.trajectories, found.checkpoints) == (0, ["checkpoint-1"])


async def test_a_pair_is_one_term_whose_sample_is_the_chosen_answer(tmp_path: Path) -> None:
    async with Run(tmp_path / "journal.sqlite").process() as one:
        one.learner.metrics |= {"learning_rate": 0.1, "grad_norm": 4 * MANUAL.optimizer.max_grad_norm}
        pairs = [*reversed(GIVEN), *(replace(each, group_id="other", completion_ids=(7, 8)) for each in GIVEN)]
        await one.service.update(given=pairs, signal=Signal.PREFERENCES)
        service = Why(one.service, ByteTokenizer())
        (past,) = [each async for each in service.past(await service.history(None, EVERYTHING))]
        terms = [*past.terms(UpdateSettings.of(MANUAL))]
        assert [sample.reward for sample, _, _ in terms] == [1.0, 1.0]
        assert [len(term.data) for _, _, term in terms] == [2, 2]
        assert [share for _, share, _ in terms] == pytest.approx([1 / 3, 2 / 3]), "of two tokens, and of four"
        assert {term.totals.sequences for _, _, term in terms} == {4.0}
        assert [term.step for _, _, term in terms] == pytest.approx([0.025] * 2), "clipping left a quarter"


async def test_products_with_samples_of_other_keys_are_not_computed(tmp_path: Path) -> None:
    """They would tell a key whether its guess of another's answer is right."""
    async with Run(tmp_path / "journal.sqlite").process() as one:
        one.learner.metrics["learning_rate"] = 0.1
        both = [replace(each, owner=key, group_id=key) for key in ("ann", "bob") for each in GIVEN]
        await one.service.update(given=both)
        service = Why(one.service, ByteTokenizer())
        history = await service.history(None, EVERYTHING)
        for reader, keys, unreadable in ((EVERYTHING, {"ann", "bob"}, 0), (Reader("bob"), {"bob"}, 2)):
            samples, count, _ = await service.answers._largest(history, 100, reader)
            assert ({each.sample.owner for each in samples}, count.all, count.unreadable) == (keys, 4, unreadable)
