"""What people say: opinions in time and late, edits with losses of their own, and the report of what was learnt."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from configs import changed
from rl.fakes import trajectories
from rl.service_rig import GIVEN, SETTINGS, World, settle, until, world
from rl.test_recovery import MANUAL, Adding, Run

from mlx_parallm.config import Algorithm
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import CollectionSpec, Signal
from mlx_parallm.errors import (
    ConflictError,
    InvalidRequestError,
    QueueFullError,
    StorageError,
    UnknownModelError,
    UnknownTrajectoryError,
)
from mlx_parallm.extras.atropos.groups import AtroposGroups, GivenGroup
from mlx_parallm.extras.people.service import Edit
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.sources import SourceReport
from mlx_parallm.rl.trajectories import DropReason

STRICT = changed(MANUAL, max_staleness=0)
"""Everything that the last update's version did not draw is too old."""


def correction(number: int = 0, **fields: str) -> Edit:
    return Edit("main", (1,), (7 + number, 2), **fields)


def preference(number: int = 0, **fields: str) -> Edit:
    return Edit("main", (1,), (7 + number, 2), (5, 2), **fields)


def rewards(one: World) -> dict[str, float | None]:
    return {each.trajectory_id: member.reward for each, member in one.service.trajectories.buffer.newest(99)}


def of_source(one: World, name: str) -> SourceReport:
    return next(each for each in one.people.signal_report().sources if each.source == name)


async def stale_answers(one: World) -> tuple[str, ...]:
    """Answers that nobody judged before the next version came."""
    ids = await one.request(scorer=None)
    await one.request()
    await settle()
    await one.service.update()
    await settle()
    assert {one.states()[each] for each in ids} <= {"stale", "unknown_version"}
    return ids


# ---- opinions ------------------------------------------------------------------------------------


async def test_the_reward_is_the_mean_of_each_persons_last_opinion() -> None:
    async with world(MANUAL) as one:
        first, second = await one.request(scorer=None)
        for user, score in (("ann", 1.0), ("bob", 0.0), ("ann", 0.0), ("ann", 1.0), ("cy", 1.0)):
            card = await one.service.trajectories.feedback(first, score, user)
        assert (card.reward, card.people, card.late) == (pytest.approx(2 / 3), 3, False)
        assert (await one.service.trajectories.feedback(second, 0.25)).reward == 0.25
        assert (await one.service.trajectories.feedback(second, 0.5)).reward == 0.5, "unnamed opinions are those of one"
        assert rewards(one) == {first: pytest.approx(2 / 3), second: 0.5}
        report = one.people.signal_report()
        assert (report.opinions, report.people) == (7, 3)


async def test_opinions_survive_a_crash_person_by_person(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        first, _ = await one.request(scorer=None)
        await one.service.trajectories.feedback(first, 1.0, "ann")
        await one.service.trajectories.feedback(first, 0.0, "bob")
    async with run.process() as one:
        assert rewards(one)[first] == 0.5
        assert (await one.service.trajectories.feedback(first, 1.0, "bob")).reward == 1.0


async def test_one_answer_takes_a_bounded_number_of_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.rl.groups.MAX_PEOPLE", 2)
    async with world(MANUAL) as one:
        first, _ = await one.request(scorer=None)
        await one.service.trajectories.feedback(first, 1.0, "ann")
        await one.service.trajectories.feedback(first, 1.0, "bob")
        with pytest.raises(ConflictError, match="2 people have judged"):
            await one.service.trajectories.feedback(first, 1.0, "cy")
        assert (await one.service.trajectories.feedback(first, 0.0, "ann")).reward == 0.5


async def test_an_opinion_of_a_trained_answer_is_refused_and_says_why(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        first, second = await one.request(scorer=None)
        await one.service.trajectories.feedback(first, 1.0)
        await one.service.trajectories.feedback(second, 0.0)
        await one.service.update()
        with pytest.raises(ConflictError, match="trained on already"):
            await one.service.trajectories.feedback(first, 0.0)
        with pytest.raises(UnknownTrajectoryError):
            await one.service.trajectories.feedback("traj-none", 0.0)
    async with run.process() as one:
        with pytest.raises(ConflictError, match="trained on already"):
            await one.service.trajectories.feedback(first, 0.0)


async def test_late_feedback_is_learnt_with_kto_where_grpo_drops_the_answer(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite", STRICT)
    async with run.process() as one:
        good, bad = await stale_answers(one)
        card = await one.service.trajectories.feedback(good, 0.5, "ann")
        assert (card.reward, card.people, card.late) == (1.0, 1, True)
        assert (await one.service.trajectories.feedback(bad, 0.0, "ann")).reward == -1.0
        assert (await one.service.trajectories.feedback(good, 1.0, "bob")).people == 2
        report = await one.service.update(signal=Signal.LATE_FEEDBACK)
        assert (report.status, report.signal) == ("published", Signal.LATE_FEEDBACK)
        assert "reward_mean" not in report.metrics, "verdicts are no rewards"
        batch = one.learner.batches[-1]
        assert batch.loss.algorithm is Algorithm.KTO
        assert [max(sample.advantages, key=abs) for sample in batch.samples] == [1.0, -1.0]
        with pytest.raises(ConflictError, match="it was trained"):
            await one.service.trajectories.feedback(good, 0.0, "ann")
        policy = one.learner.policies["main"]
    async with run.process() as one:
        assert one.learner.policies["main"] == policy, "made again with the same loss"
        assert one.learner.batches[-1].loss.algorithm is Algorithm.KTO


async def test_late_feedback_that_waits_when_the_process_is_killed_waits_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite", STRICT)
    async with run.process() as one:
        good, _ = await stale_answers(one)
        await one.service.trajectories.feedback(good, 1.0, "ann")
        await one.service.trajectories.feedback(good, 1.0, "bob")
    async with run.process() as one:
        assert rewards(one)[f"late-{good}"] == 1.0
        (group,) = one.service.trajectories.buffer.ready("main", Signal.LATE_FEEDBACK)
        assert [member.trajectory.group_size for member in group.members] == [1], "it is compared with no other"
        assert (await one.service.trajectories.feedback(good, 0.0, "ann")).reward == 0.0
        report = await one.service.update(signal=Signal.LATE_FEEDBACK)
        assert (report.status, report.reason) == ("skipped", "no_signal"), "as many for it as against it"
        assert one.states()[f"late-{good}"] == "zero_variance"


async def test_opinions_that_come_at_once_make_one_late_answer(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite", STRICT)
    async with run.process() as one:
        good, _ = await stale_answers(one)
        cards = await asyncio.gather(
            *(one.service.trajectories.feedback(good, 1.0, f"user-{each}") for each in range(5))
        )
        assert sorted(card.people for card in cards) == [1, 2, 3, 4, 5]
        assert len(one.service.trajectories.buffer.ready("main", Signal.LATE_FEEDBACK)) == 1


async def test_opinions_in_time_are_not_lost_when_other_updates_make_their_answer_too_old(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite", STRICT)
    async with run.process() as one:
        first, second = await one.request(scorer=None)
        await one.service.trajectories.feedback(first, 1.0, "ann")
        await one.service.trajectories.feedback(first, 0.0, "bob")
        await one.service.trajectories.feedback(first, 0.0, "cy")
        await one.people.edit(correction())
        await one.service.update(signal=Signal.CORRECTIONS)
        states = one.states()
        assert states[first] in ("stale", "unknown_version")
        assert (states[f"late-{first}"], rewards(one)[f"late-{first}"]) == ("scored", pytest.approx(-1 / 3))
        assert f"late-{second}" not in states, "nobody has judged it"
        assert (await one.service.trajectories.feedback(first, 1.0, "bob")).reward == pytest.approx(1 / 3)
    async with run.process() as one:
        assert rewards(one)[f"late-{first}"] == pytest.approx(1 / 3)
        assert (await one.service.update(signal=Signal.LATE_FEEDBACK)).status == "published"


async def test_opinions_in_time_join_those_that_came_late_while_their_group_was_trained_on(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite", MANUAL)
    async with run.process() as one:
        first, second = await one.request(scorer=None)
        await one.service.trajectories.feedback(first, 1.0, "ann")
        buffer = one.service.trajectories.buffer
        (group,) = buffer.take("main")
        await one.service.trajectories.feedback(second, 1.0, "ann")
        await one.service.trajectories.feedback(second, 1.0, "bob")
        buffer.sweep("main", lambda version: DropReason.STALE)
        assert (await one.service.trajectories.feedback(second, 0.0, "bob")).late
        buffer.finish(group)
        assert rewards(one)[f"late-{second}"] == 0.0, "ann is for it, and bob is against it now"
    async with run.process() as one:
        assert rewards(one)[f"late-{second}"] == 0.0


async def test_opinions_count_though_the_process_was_killed_before_their_answer_was_dropped(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite", changed(MANUAL, max_staleness=1))
    async with run.process() as one:
        first, _ = await one.request(scorer=None)
        await one.service.trajectories.feedback(first, 1.0, "ann")
        await one.service.update(given=GIVEN)
        assert one.states()[first] == "scored"
    run.training = STRICT
    async with run.process() as one:
        assert rewards(one).get(f"late-{first}") == 1.0


async def test_an_answer_whose_update_was_refused_takes_no_late_feedback(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite", MANUAL)
    async with run.process() as one:
        one.learner.metrics = {"loss": 0.5, "kl_step": 9.0}
        ids = await one.request()
        await settle()
        assert (await one.service.update()).status == "held"
        with pytest.raises(ConflictError, match=r"dropped \(held\)"):
            await one.service.trajectories.feedback(ids[0], 1.0)


# ---- edits ---------------------------------------------------------------------------------------


async def test_each_signal_has_updates_with_a_loss_of_its_own() -> None:
    async with world(changed(MANUAL, people=changed(MANUAL.people, update_frequency=2))) as one:
        await one.people.edit(preference())
        await one.people.edit(correction())
        card = await one.people.edit(correction(1))
        assert (card.signal, card.waiting, card.wanted, card.is_new) == (Signal.CORRECTIONS, 2, 2, True)
        await until(lambda: one.service.status().updates_total == 1)
        (batch,) = one.learner.batches
        assert batch.loss.algorithm is Algorithm.CROSS_ENTROPY
        assert {sample.token_ids for sample in batch.samples} == {(1, 7, 2), (1, 8, 2)}
        await one.people.edit(preference(1))
        await until(lambda: one.service.status().updates_total == 2)
        batch = one.learner.batches[-1]
        assert batch.loss.algorithm is Algorithm.DPO
        assert batch.step_scale == 1.0
        assert {(sample.token_ids, sample.advantages[-1]) for sample in batch.samples} == {
            *(((1, 7, 2), 1.0), ((1, 8, 2), 1.0), ((1, 5, 2), -1.0)),
        }
        assert one.service.status().reward_running_mean is None, "choices are no rewards"


async def test_rewards_and_edits_take_turns() -> None:
    settings = changed(SETTINGS, update_frequency=2, people=changed(SETTINGS.people, update_frequency=1))
    async with world(settings) as one:
        await one.service.pause()
        for number in range(2):
            await one.request()
            await one.people.edit(correction(number))
        await settle()
        await one.service.resume()
        await until(lambda: one.service.status().updates_total == 4)
        losses = [batch.loss and batch.loss.algorithm for batch in one.learner.batches]
        assert losses == [None, Algorithm.CROSS_ENTROPY] * 2


async def test_an_edit_that_is_sent_again_counts_once_and_a_persons_last_one_counts() -> None:
    async with world(MANUAL) as one:
        first = await one.people.edit(correction(user="ann", about="traj-1"))
        again = await one.people.edit(correction(user="ann", about="traj-1"))
        assert (again.edit_id, again.is_new, again.waiting) == (first.edit_id, False, 1)
        other = await one.people.edit(correction(1, user="ann", about="traj-1"))
        assert (other.is_new, other.waiting) == (True, 1)
        assert one.states()[f"{first.edit_id}-chosen"] == "replaced"
        assert (await one.people.edit(correction(2, user="bob", about="traj-1"))).waiting == 2
        assert (await one.people.edit(correction(3))).waiting == 3
        assert (await one.people.edit(correction(4))).waiting == 4, "those without a name may be different people"


async def test_edits_survive_a_crash_and_are_learnt_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        await one.people.edit(preference())
        await one.people.edit(correction(user="ann", about="x"))
        await one.service.update(signal=Signal.PREFERENCES)
        policy = one.learner.policies["main"]
    async with run.process() as one:
        assert one.learner.policies["main"] == policy
        assert one.learner.batches[-1].loss.algorithm is Algorithm.DPO
        again = await one.people.edit(correction(user="ann", about="x"))
        assert not again.is_new, "it waits, and is known"
        assert (await one.service.update()).signal is Signal.CORRECTIONS
        policy = one.learner.policies["main"]
    async with run.process() as one:
        assert one.learner.policies["main"] == policy
        assert one.states() == {}


async def test_edits_do_not_get_old() -> None:
    async with world(STRICT) as one:
        await one.people.edit(correction())
        for _ in range(3):
            await one.request(one.service.status().current or AdapterRef("base", 0))
            await settle()
            await one.service.update(signal=Signal.REWARDS)
        assert (await one.service.update(signal=Signal.CORRECTIONS)).status == "published"


async def test_edits_that_the_disk_refuses_or_that_find_no_room_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> None:
        raise StorageError("the journal of the run cannot be written: disk full")

    async with world(changed(MANUAL, trajectory_buffer_size=4)) as one:
        for number in range(2):
            await one.people.edit(preference(number))
        with pytest.raises(QueueFullError):
            await one.people.edit(preference(2))
        await one.service.update()
        monkeypatch.setattr(Journal, "accept", full)
        with pytest.raises(StorageError):
            await one.people.edit(preference(3))
        assert (await one.service.update()).reason == "no_trajectories"


async def test_an_adapter_that_is_not_trained_takes_no_edits() -> None:
    async with world(MANUAL) as one:
        with pytest.raises(UnknownModelError, match="'other' is not trained here"):
            await one.people.edit(Edit("other", (1,), (2,)))


async def test_answers_are_found_whatever_became_of_them(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite", STRICT)
    async with run.process() as one:
        good, _ = await stale_answers(one)
    async with run.process() as one:
        found = await one.people.find(good)
        assert (found.adapter, found.prompt_ids, found.completion_ids, found.text) == ("main", (1,), (5, 2), "a")
        with pytest.raises(UnknownTrajectoryError, match="traj-none"):
            await one.people.find("traj-none")


async def test_a_score_that_is_no_number_is_refused() -> None:
    async with world(MANUAL) as one:
        first, _ = await one.request(scorer=None)
        with pytest.raises(InvalidRequestError):
            await one.service.trajectories.feedback(first, float("nan"), "ann")
        assert one.people.signal_report().opinions == 0


# ---- the report ----------------------------------------------------------------------------------


async def test_the_report_says_what_came_of_each_source_and_what_its_updates_moved(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite", STRICT)
    async with run.process() as one:
        one.learner.metrics = {"loss": 0.5, "grad_norm": 3.0}
        late, _ = await stale_answers(one)
        one.learner.metrics = {"loss": 0.5, "grad_norm": 1.0}
        await one.service.trajectories.feedback(late, 1.0)
        await one.service.update(signal=Signal.LATE_FEEDBACK)
        await one.people.edit(preference())
        scored = of_source(one, "scorers")
        assert (scored.arrived, scored.trained, scored.updates, scored.gradient_share) == (2, 2, 1, 0.75)
        given_late = of_source(one, "late_feedback")
        assert (given_late.trained, given_late.updates, given_late.gradient_share) == (1, 1, 0.25)
        assert of_source(one, "unrated").dropped.keys() <= {"stale", "unknown_version"}
        edits = of_source(one, "preferences")
        assert (edits.arrived, edits.waiting, edits.trained, edits.updates) == (2, 2, 0, 0)


async def test_what_an_environment_rewards_is_told_apart_from_what_waits_for_people() -> None:
    async with world(MANUAL) as one:
        drawn = trajectories("g", AdapterRef("base", 0), scorer=None)
        turns = [replace(t, collection=CollectionSpec(group_id="g", episode_id=f"e{t.trajectory_id}")) for t in drawn]
        await one.service.trajectories.collect_episodes(
            turns, {f"e{t.trajectory_id}": 1.0 - place for place, t in enumerate(turns)}
        )
        await AtroposGroups(one.service).give(GivenGroup("h", "atropos:a", GIVEN))
        await one.request(scorer=None)
        waiting = {each.source: each.waiting for each in one.people.signal_report().sources}
        assert waiting == {"environments": 4, "unrated": 2}


async def test_changes_of_the_reward_are_ascribed_to_the_updates_before_them() -> None:
    async with world(MANUAL) as one:
        for score in (0.0, 1.0):
            ids = await one.request(scorer=None)
            await one.service.trajectories.feedback(ids[0], score)
            await one.service.update()
            if score == 0.0:
                await one.people.edit(correction())
                await one.service.update()
        assert of_source(one, "feedback").reward_change == 0.5
        assert of_source(one, "corrections").reward_change == 0.5


async def test_the_journal_of_an_adding_learner_tells_losses_apart(tmp_path: Path) -> None:
    """Guards the tests above: the same edit as a correction and as a preference makes different policies."""
    policies = []
    for name, edit in (("a", correction()), ("b", preference())):
        (tmp_path / name).mkdir()
        async with Run(tmp_path / name / "journal.sqlite").process() as one:
            assert isinstance(one.learner, Adding)
            await one.people.edit(edit)
            await one.service.update()
            policies.append(one.learner.policies["main"])
    assert policies[0] != policies[1]
