"""What people read about each sample of a group: its advantages, thumbs and edits."""

from __future__ import annotations

from configs import changed
from rl.service_rig import SETTINGS, World, settle, world
from rl.test_recovery import MANUAL

from mlx_parallm.config import RewardScale
from mlx_parallm.core.readers import EVERYTHING
from mlx_parallm.extras.people.service import Edit
from mlx_parallm.rl.reading import Thumbs


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
