"""The environment of docs/environments.md, played by a model that answers as the page says."""

from __future__ import annotations

from pathlib import Path

from docs.pages import blocks_of
from rl.rollout_rig import episode_of, last_message, rig

from mlx_parallm.rl.environments import environment

TWO = {"fruit": ("apple", "kiwi"), "animal": ("cat", "dog"), "color": ("red", "blue"), "city": ("rome", "paris")}


async def test_the_environment_of_the_page_rewards_right_answers(tmp_path: Path) -> None:
    (source,) = (block.text for block in blocks_of("docs/environments.md") if block.title == "kinds.py")
    (tmp_path / "kinds.py").write_text(source)

    def answer(request) -> str:
        first, second = TWO[request.collection.metadata["kind"]]
        is_second = "another" in last_message(request)
        return ("I do not know", first, second if is_second else first)[episode_of(request)]

    async with rig(environment(f"{tmp_path}/kinds.py:NameTwo"), answer, group_size=3) as world:
        drawn = await world.draw(2)
        assert (drawn.failures, drawn.faults) == ((), ())
        assert [list(rewards.values()) for _, rewards in world.groups] == [[0.125, 0.75, 1.0]] * 2
        assert [turn.collection.unmatched for turns, _ in world.groups for turn in turns] == [""] * 12
