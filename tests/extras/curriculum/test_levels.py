"""The curriculum: how often levels are drawn, and how a run goes on."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random

import pytest

from mlx_parallm.config import CurriculumConfig
from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.extras.curriculum import LAG, WITHOUT, Curriculum
from mlx_parallm.rl.environments import Task
from mlx_parallm.rl.rollouts.steps import figures_of

ON = CurriculumConfig(enabled=True)
LEVELS = ("easy", "fair", "hard")
GROUP = 8
"""Answers of a task."""


def task(number: int, level: str | None) -> Task:
    return Task(({"role": "user", "content": str(number)},), CollectionSpec(), level)


def stream(levels: Sequence[str | None] = LEVELS) -> Iterator[Task]:
    return (task(number, level) for number, level in enumerate(itertools.cycle(levels)))


def number_of(one: Task) -> int:
    return int(one.messages[0]["content"])


def drawn(curriculum: Curriculum, count: int, success: Callable[[Task], float], first: int = 0) -> list[Task]:
    """Takes tasks, and rewards the answers of each, 1 or 0 by chance, before the next one is taken."""
    tasks = []
    for number in range(first, first + count):
        dice = Random(number)
        tasks.append(next(curriculum))
        curriculum.learn(number, [float(dice.random() < success(tasks[-1])) for _ in range(GROUP)])
    curriculum.settle()
    return tasks


def share_of(curriculum: Curriculum) -> dict[str, float]:
    return {card.level: card.share for card in curriculum.cards}


# ---- shares --------------------------------------------------------------------------------------


def test_levels_are_drawn_above_a_floor_by_how_often_their_rewards_differ() -> None:
    success = {"easy": 0.95, "fair": 0.5, "hard": 0.02}
    settings = CurriculumConfig(enabled=True, floor=0.3, memory=400)
    curriculum = Curriculum(stream(), settings, 0)
    tasks = drawn(curriculum, 2000, lambda one: success[one.level or ""])
    promise = {level: 1 - p**GROUP - (1 - p) ** GROUP for level, p in success.items()}
    expected = {level: 0.3 / 3 + 0.7 * value / sum(promise.values()) for level, value in promise.items()}
    assert share_of(curriculum) == pytest.approx(expected, abs=0.04)
    counts = Counter(one.level for one in tasks)
    assert {level: count / 2000 for level, count in counts.items()} == pytest.approx(expected, abs=0.04)
    assert {card.level: card.success for card in curriculum.cards} == pytest.approx(success, abs=0.03)
    assert {card.level: card.drawn for card in curriculum.cards} == counts
    assert figures_of(curriculum.cards)["curriculum/easy/drawn"] == counts["easy"]


def test_with_equal_success_tasks_come_as_often_as_in_the_environment() -> None:
    many = ("easy",) * 8 + ("hard",) * 2
    curriculum = Curriculum(stream(many), ON, 0)
    tasks = drawn(curriculum, 2000, lambda _: 0.3)
    assert share_of(curriculum) == pytest.approx({"easy": 0.8, "hard": 0.2}, abs=0.06)
    assert Counter(one.level for one in tasks)["hard"] / 2000 == pytest.approx(0.2, abs=0.04)


def test_tasks_without_levels_come_in_their_own_order() -> None:
    curriculum = Curriculum(stream([None]), ON, 0)
    assert [number_of(one) for one in drawn(curriculum, 500, lambda one: number_of(one) % 2)] == [*range(500)]
    assert share_of(curriculum) == {WITHOUT: 1.0}


def test_success_that_changes_is_followed() -> None:
    curriculum = Curriculum(stream(), ON, 0)
    drawn(curriculum, 300, lambda one: {"easy": 0.5, "fair": 0.5, "hard": 0.0}[one.level or ""])
    assert share_of(curriculum)["hard"] < 0.1
    drawn(curriculum, 600, lambda one: {"easy": 1.0, "fair": 1.0, "hard": 0.5}[one.level or ""], first=300)
    assert share_of(curriculum)["hard"] > 0.8


def test_rewards_outside_of_0_to_1_are_cut() -> None:
    curriculum = Curriculum(stream(["one"]), CurriculumConfig(enabled=True, memory=1), 0)
    next(curriculum)
    curriculum.learn(0, [-3.0, 7.0, 1.0, 1.0])
    curriculum.settle()
    assert [card.success for card in curriculum.cards] == [0.75]


# ---- the environment's stream --------------------------------------------------------------------


def test_a_task_is_drawn_once_and_those_of_a_level_in_their_order() -> None:
    tasks = drawn(Curriculum(stream(), ON, 0), 300, lambda one: float(one.level != "hard"))
    for level in LEVELS:
        numbers = [number_of(one) for one in tasks if one.level == level]
        assert numbers == sorted(set(numbers))


def test_a_level_that_comes_later_is_found_and_tried() -> None:
    late = itertools.chain(itertools.islice(stream(["easy"]), 1000), stream(["easy", "late"]))
    tasks = drawn(Curriculum(late, ON, 0), 2000, lambda one: float(one.level == "easy"))
    assert "late" in {one.level for one in tasks}


def test_an_environment_that_ends_gives_all_its_tasks_first() -> None:
    tasks = [*Curriculum(itertools.islice(stream(), 50), ON, 0)]
    assert sorted(map(number_of, tasks)) == [*range(50)]


# ---- restarts ------------------------------------------------------------------------------------


def order(delay: Callable[[int], int], count: int = 200) -> list[int]:
    """The tasks, when the rewards of each come before the task that is so many further is taken."""
    curriculum, taken, due = Curriculum(stream(), ON, 0), list[Task](), dict[int, list[int]]()
    for number in range(count):
        for done in due.pop(number, ()):
            curriculum.learn(done, [0.0, 1.0] if taken[done].level == "hard" else [1.0, 1.0])
        taken.append(next(curriculum))
        due.setdefault(number + delay(number), []).append(number)
    return [number_of(one) for one in taken]


def test_the_order_of_tasks_does_not_depend_on_when_rewards_come() -> None:
    dice = Random(0)
    orders = [order(lambda _: 1), order(lambda _: 5), order(lambda _: LAG), order(lambda _: dice.randint(1, LAG))]
    assert orders[1:] == orders[:1] * 3
    assert order(lambda _: 10**6) != orders[0], "rewards matter"


@pytest.mark.parametrize("stop", [8, 60, 400])
@pytest.mark.parametrize("levels", [LEVELS, ("much",) * 40 + ("rare",)])
def test_a_run_that_takes_tasks_ahead_goes_on_exactly(levels: Sequence[str], stop: int) -> None:
    """Whatever came for those tasks, and if a level has so many tasks waiting that the oldest are left out."""

    def reward(one: Task) -> list[float]:
        solved = 1.0 if one.level == "much" else 0.4
        return [float(Random(f"{one.level}/{number_of(one)}/{at}").random() < solved) for at in range(GROUP)]

    first, dice, taken, due = Curriculum(stream(levels), ON, 7), Random(stop), list[Task](), dict[int, list[int]]()
    for number in range(stop + 6):
        for done in due.pop(number, ()):
            first.learn(done, reward(taken[done]))
        taken.append(next(first))
        due.setdefault(number + dice.randint(1, LAG), []).append(number)
    for number in range(stop):  # a second time, for most of them
        first.learn(number, reward(taken[number]))
    first.settle(before=stop)
    second = Curriculum(stream(levels), ON, 7, stop, first.state)
    assert stop < 400 or levels == LEVELS or first.state["curriculum/much/waiting"] >= 255
    again = [next(second) for _ in range(6)]
    assert again == taken[stop:]
    for number, one in enumerate(again, stop):
        first.learn(number, reward(one))
        second.learn(number, reward(one))
    assert [next(second) for _ in range(300)] == [next(first) for _ in range(300)]
    first.settle()
    second.settle()
    assert second.state == first.state
    assert second.cards == first.cards
