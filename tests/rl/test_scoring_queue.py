"""Whose turn it is to be scored: pure decisions, on jobs that are made up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.rl.scoring.queue import FairQueue, Rule


class Job:
    def __init__(self, client: str, scorer: str = "exact", size: int = 1) -> None:
        self.rule, self.size = Rule(client, scorer, ""), size


def put(turns: FairQueue[Job], *jobs: Job) -> list[Job]:
    for job in jobs:
        turns.put(job)
    return list(jobs)


def served(turns: FairQueue[Job], seconds: dict[str, float], count: int, most: int = 1) -> str:
    """Clients in the order of their turns, one place, each turn as long as its client's `seconds`."""
    order = ""
    for _ in range(count):
        turn = turns.take(most)
        assert turn is not None
        client = turn[0].rule.client
        turns.end(turn, seconds[client])
        order += client
    return order


def test_clients_share_the_time_and_not_the_turns() -> None:
    turns: FairQueue[Job] = FairQueue(1)
    put(turns, *[Job("s") for _ in range(10)], *[Job("q") for _ in range(10)])
    assert served(turns, {"s": 5.0, "q": 1.0}, 12) == "sqqqqqsqqqqq"


def test_one_rule_holds_all_places_but_one() -> None:
    turns: FairQueue[Job] = FairQueue(3)
    put(turns, *[Job("a", "slow") for _ in range(5)])
    under_way = [turns.take(1), turns.take(1)]
    assert turns.take(1) is None
    (late,) = put(turns, Job("b"))
    turn = turns.take(1)
    assert turn is not None
    assert turn == [late]
    turns.end(under_way[0], 1.0)
    turns.end(turn, 1.0)
    assert turns.take(1) is not None


def test_a_newcomer_has_its_share_from_now_on_and_no_more() -> None:
    turns: FairQueue[Job] = FairQueue(1)
    put(turns, *[Job("a") for _ in range(9)])
    served(turns, {"a": 100.0}, 3)
    put(turns, *[Job("b") for _ in range(9)])
    order = served(turns, {"a": 1.0, "b": 1.0}, 6)
    assert order.count("a") == order.count("b") == 3


def test_a_turn_has_jobs_of_one_rule_in_order_up_to_its_size() -> None:
    turns: FairQueue[Job] = FairQueue(1)
    a, b, c, d, e = put(turns, Job("x", size=2), Job("x", "other"), Job("x", size=2), Job("x"), Job("x", size=9))
    first = turns.take(4)
    assert first is not None
    assert first == [a, c]
    turns.put_back([c])
    turns.end(first, 1.0)
    second = turns.take(4)
    assert second is not None
    assert second == [b]
    turns.end(second, 1.0)
    third = turns.take(4)
    assert third is not None
    assert third == [c, d]
    turns.end(third, 1.0)
    assert turns.take(4) == [e]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(1, 5), st.sampled_from("ptew")),
        max_size=60,
    ),
    st.integers(1, 3),
)
def test_every_job_has_one_turn_or_is_withdrawn_and_nothing_is_left(steps, places: int) -> None:
    turns: FairQueue[Job] = FairQueue(places)
    waiting: list[Job] = []
    under_way = []
    for client, rule, size, step in steps:
        if step == "p":
            waiting += put(turns, Job(client, rule, size))
        elif step == "t" and len(under_way) < places and (turn := turns.take(4)) is not None:
            for job in turn:
                waiting.remove(job)
            under_way.append(turn)
        elif step == "e" and under_way:
            turns.end(under_way.pop(0), size / 2)
        elif step == "w" and waiting:
            turns.withdraw(waiting.pop())
    for turn in under_way:
        turns.end(turn, 1.0)
    while (turn := turns.take(4)) is not None:
        for job in turn:
            waiting.remove(job)
        turns.end(turn, 1.0)
    assert waiting == []
    assert turns.waiting == []
    (last,) = put(turns, Job("d"))
    assert turns.take(1) == [last]
    turns.end([last], 1.0)
    assert turns._client_seconds == turns._rule_seconds == turns._running == {}
