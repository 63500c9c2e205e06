"""Which base model gives way, and when."""

from __future__ import annotations

import pytest

from mlx_parallm.app.models import GRACE_S, TURN, Residency, ResidentModel


def loaded(name: str, weight_bytes: int = 6, **fields: object) -> ResidentModel:
    return ResidentModel(name, loaded=True, weight_bytes=weight_bytes, load_seconds=10.0, **fields)  # type: ignore[arg-type]


def test_those_who_use_a_base_model_keep_it_for_its_turn() -> None:
    residency = Residency([used := loaded("a", users=1, loaded_at=100.0)], 10)
    turn_ends = 100.0 + TURN * 10.0
    assert residency.next_to_leave(turn_ends - 0.1) is None
    assert residency.ask_again_at() == turn_ends
    assert residency.next_to_leave(turn_ends) is used


@pytest.mark.parametrize(("load_seconds", "grace"), [(10.0, GRACE_S), (0.2, 0.2)])
def test_one_that_nobody_uses_gives_way_within_its_turn(load_seconds: float, grace: float) -> None:
    residency = Residency([unused := loaded("a", loaded_at=100.0, used_at=105.0)], 10)
    unused.load_seconds = load_seconds
    turn_ends = 100.0 + TURN * load_seconds
    assert residency.ask_again_at() == min(turn_ends, 105.0 + grace)
    assert residency.next_to_leave(105.0 + grace) is unused


def test_of_those_that_nobody_uses_the_least_recently_used_one_gives_way() -> None:
    residents = [loaded("a", used_at=3.0), loaded("b", used_at=2.0), loaded("c", used_at=1.0, users=2)]
    assert Residency(residents, 10).next_to_leave(1e9) is residents[1]
