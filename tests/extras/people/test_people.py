"""What people say: opinions in time and late, edits with losses of their own, and the report of what was learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import changed
from rl.service_rig import World, settle, until, world
from rl.test_recovery import MANUAL, Run

from mlx_parallm.config import Algorithm
from mlx_parallm.core.requests import Signal
from mlx_parallm.errors import (
    ConflictError,
)
from mlx_parallm.extras.people.service import Edit
from mlx_parallm.rl.sources import SourceReport

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
