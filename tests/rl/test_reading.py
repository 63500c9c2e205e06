"""Groups as people read them: the list and its pages, who sees what, and what is known about each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from configs import changed
from rl.fakes import set_scores, trajectories
from rl.service_rig import SETTINGS, World, settle, world
from rl.test_recovery import MANUAL

from mlx_parallm.config import RewardScale
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.readers import EVERYTHING, Reader
from mlx_parallm.errors import UnknownTrajectoryError
from mlx_parallm.extras.people.service import Edit
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.reading import GroupFilter, GroupReader, Thumbs
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup

ALL = GroupFilter()


class Shelf:
    """A buffer that is read."""

    def __init__(self, size: int = 100) -> None:
        self.buffer = TrajectoryBuffer(size)
        self.reader = GroupReader(self.buffer)

    def put(
        self,
        name: str,
        *rewards: float,
        version: int = 1,
        adapter: str = "math",
        owners: Sequence[str | None] = ("me",),
    ) -> TrajectoryGroup:
        """A group of one answer for each reward, or of two without one. `owners`: in turns."""
        drawn = trajectories(name, AdapterRef(adapter, version), len(rewards) or 2)
        owned = [replace(each, owner=owners[at % len(owners)]) for at, each in enumerate(drawn)]
        group = TrajectoryGroup(adapter, owned)
        self.buffer.add(group)
        if rewards:
            set_scores(group, rewards)
        return group

    async def names(
        self, wanted: GroupFilter = ALL, after: int | None = None, limit: int = 100, reader: Reader = EVERYTHING
    ) -> list[str]:
        page = await self.reader.page(wanted, after, limit, reader)
        return [row.group_id for row in page.rows]


async def test_a_page_has_what_waits_and_what_has_ended_newest_first() -> None:
    shelf = Shelf()
    first, _, third, _ = shelf.put("a", 1.0, 0.0), shelf.put("b"), shelf.put("c", 1.0, 1.0), shelf.put("d", 0.5, 0.25)
    shelf.buffer.take("math", 2)
    shelf.buffer.drop(third, DropReason.ZERO_VARIANCE)
    rows = (await shelf.reader.page(ALL, None, 100, EVERYTHING)).rows
    assert [(row.group_id, row.samples, row.reward, row.fate, row.reason) for row in rows] == [
        ("d", 2, 0.375, "scored", ""),
        ("c", 2, 1.0, "dropped", "zero_variance"),
        ("b", 2, None, "waiting", ""),
        ("a", 2, 0.5, "training", ""),
    ]
    shelf.buffer.finish(first)
    assert (await shelf.reader.page(ALL, None, 100, EVERYTHING)).rows[-1].fate == "trained"


async def test_pages_follow_each_other_while_groups_come_and_are_forgotten() -> None:
    shelf = Shelf(size=12)
    for number in range(6):
        shelf.put(f"g{number}", 1.0, 0.0)
    first = await shelf.reader.page(ALL, None, 2, EVERYTHING)
    assert [row.group_id for row in first.rows] == ["g5", "g4"]
    assert first.more
    for number in range(6, 15):  # those that were there are dropped, and the first of them forgotten
        shelf.put(f"g{number}", 1.0, 0.0)
    assert await shelf.names(after=first.rows[-1].number) == ["g3"]
    assert await shelf.names(limit=2) == ["g14", "g13"]
    assert not (await shelf.reader.page(ALL, first.rows[-1].number, 1, EVERYTHING)).more


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (GroupFilter(adapter="math"), ["c", "b", "a"]),
        (GroupFilter(adapter="none"), []),
        (GroupFilter(version="math@2"), ["b"]),
        (GroupFilter(fate="dropped"), ["c"]),
        (GroupFilter(fate="waiting"), ["d"]),
        (GroupFilter(least_reward=0.5), ["c", "b"]),
        (GroupFilter(least_reward=0.25, most_reward=0.75), ["b"]),
        (GroupFilter(most_reward=0.0), ["a"]),
        (GroupFilter(adapter="math", fate="scored", most_reward=0.25), ["a"]),
    ],
)
async def test_filters(wanted: GroupFilter, names: list[str]) -> None:
    shelf = Shelf()
    shelf.put("a", 0.0, 0.0)
    shelf.put("b", 0.0, 1.0, version=2)
    shelf.buffer.drop(shelf.put("c", 1.0, 1.0), DropReason.STALE)
    shelf.put("d", adapter="tone")
    assert await shelf.names(wanted) == names


async def test_a_key_sees_its_own_samples_and_those_of_the_server_and_an_admin_all() -> None:
    shelf = Shelf()
    for name, owners in {
        "mine": ["me"],
        "theirs": ["you"],
        "both": ["me", "you"],
        "own": [""],
        "given": [None],
    }.items():
        shelf.put(name, 0.0, 1.0, owners=owners)
    assert await shelf.names(reader=EVERYTHING) == ["given", "own", "both", "theirs", "mine"]
    assert await shelf.names(reader=Reader("me")) == ["own", "both", "mine"]
    (both,) = (row for row in (await shelf.reader.page(ALL, None, 9, Reader("you"))).rows if row.group_id == "both")
    assert (both.samples, both.reward, both.first.trajectory_id) == (1, 1.0, "both-1")
    assert [s.turns[0].trajectory.trajectory_id for s in shelf.reader.group("both", 9, Reader("me")).samples] == [
        "both-0"
    ]
    for name in ("theirs", "theirs-0", "given", "none"):
        with pytest.raises(UnknownTrajectoryError, match="No group and no trajectory"):
            shelf.reader.group(name, 9, Reader("me"))


async def test_a_group_is_found_by_its_trajectories_also_when_it_has_ended() -> None:
    shelf = Shelf()
    shelf.buffer.drop(shelf.put("a", 0.0, 1.0, 0.5), DropReason.STALE)
    for name in ("a", "a-2"):
        found = shelf.reader.group(name, 2, EVERYTHING)
        assert (found.row.samples, len(found.samples)) == (3, 2)
    assert [(sample.fate, sample.reason) for sample in found.samples] == [("dropped", "stale")] * 2


def advantages(one: World, trajectory_id: str) -> list[tuple[float | None, tuple[float, ...], Thumbs]]:
    group = one.service.collected_groups.group(trajectory_id, 9, EVERYTHING)
    return [(sample.advantage, tuple(sample.turns[0].advantages), sample.thumbs) for sample in group.samples]


async def test_advantages_are_those_of_the_update() -> None:
    async with world(changed(MANUAL, scale_rewards=RewardScale.NONE)) as one:
        first, _ = await one.request()
        await settle()
        assert advantages(one, first) == [(None, (), Thumbs.COUNT)] * 2
        await one.service.update()
        assert advantages(one, first) == [
            (0.5, (0.5, 0.5), Thumbs.NOTHING),
            (-0.5, (-0.5, -0.5), Thumbs.NOTHING),
        ]


async def test_rewards_of_tokens_have_advantages_token_by_token() -> None:
    async with world(changed(MANUAL, scale_rewards=RewardScale.NONE)) as one:
        first, second = await one.request(scorer=None)
        await one.service.trajectories.reward_tokens(first, [1.0, 2.0])
        await one.service.trajectories.reward_tokens(second, [0.0, 1.0])
        await one.service.update()
        (_, tokens, _), _ = advantages(one, first)
        learnt = next(sample for sample in one.learner.batches[0].samples if max(sample.advantages) > 0)
        assert [*tokens] == [
            value for value, weight in zip(learnt.advantages, learnt.loss_weights, strict=True) if weight
        ]


async def test_thumbs_and_edits_are_counted_also_late_ones() -> None:
    async with world(changed(SETTINGS, max_staleness=0, update_frequency=99)) as one:
        answer, other = await one.request(scorer=None)
        for user, score in (("ann", 1.0), ("bob", 0.0), ("cy", -1.0)):
            await one.service.trajectories.feedback(answer, score, user)
        shelf = one.service.collected_groups
        sample = shelf.group(answer, 9, EVERYTHING).samples[0]
        assert (sample.turns[0].up, sample.turns[0].down, sample.thumbs) == (1, 2, Thumbs.COUNT)
        assert shelf.group(answer, 9, EVERYTHING).row.fate == "scored", (
            "one thumb is enough for the answers of one request"
        )
        for owner, text in (("me", "better"), ("you", "another")):
            edit = Edit("main", (1,), (7, 2), chosen_text=text, about=other, user=owner, owner=owner)
            await one.people.edit(edit)
        edits = shelf.group(other, 9, EVERYTHING).samples[1].turns[0].edits
        assert [(edit.text, edit.signal.value, edit.fate) for edit in edits] == [
            ("better", "corrections", "scored"),
            ("another", "corrections", "scored"),
        ]


async def test_an_edit_is_a_group_of_its_own_on_which_thumbs_do_nothing() -> None:
    async with world(MANUAL) as one:
        card = await one.people.edit(Edit("main", (1,), (7, 2), (5, 2), chosen_text="a", owner="me"))
        group = one.service.collected_groups.group(card.edit_id, 9, Reader("me"))
        assert (group.row.signal.value, group.row.reward, len(group.samples)) == ("preferences", None, 2)
        assert {sample.thumbs for sample in group.samples} == {Thumbs.NOTHING}
        with pytest.raises(UnknownTrajectoryError):
            one.service.collected_groups.group(card.edit_id, 9, Reader("you"))
