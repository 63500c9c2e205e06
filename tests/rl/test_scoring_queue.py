"""Who is scored next, and that every job is taken once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.rl.scoring.pool import FairQueue, Rule, ScoringJob


def job(client: str, scorer: str = "exact", size: int = 1) -> ScoringJob:
    return ScoringJob(Rule(client, scorer, ""), size)


def put(queue: FairQueue, *jobs: ScoringJob) -> list[ScoringJob]:
    for each in jobs:
        queue.put(each)
    return list(jobs)


def served(queue: FairQueue, seconds: dict[str, float], count: int) -> str:
    """Clients in the order in which one process gets their jobs, each as long as its client's `seconds`."""
    order, ended = "", None
    for _ in range(count):
        ended = queue.take(ended)
        assert ended is not None
        queue.end(ended, seconds[ended.rule.client])
        order += ended.rule.client
    return order


def test_clients_share_the_time_and_not_the_turns() -> None:
    queue = FairQueue(1, 32)
    put(queue, *[job("s") for _ in range(10)], *[job("q") for _ in range(10)])
    assert served(queue, {"s": 5.0, "q": 1.0}, 12) == "sqqqqqsqqqqq"


def test_one_rule_holds_all_places_but_one() -> None:
    queue = FairQueue(3, 1)
    put(queue, *[job("a", "slow") for _ in range(5)])
    under_way = [queue.take(), queue.take()]
    assert queue.take() is None
    (late,) = put(queue, job("b"))
    assert queue.take() is late
    assert under_way[0] is not None
    queue.end(under_way[0], 1.0)
    queue.end(late, 1.0)
    assert queue.take() is not None


def test_a_newcomer_has_its_share_from_now_on_and_no_more() -> None:
    queue = FairQueue(1, 1)
    put(queue, *[job("a") for _ in range(9)])
    served(queue, {"a": 100.0}, 3)
    put(queue, *[job("b") for _ in range(9)])
    order = served(queue, {"a": 1.0, "b": 1.0}, 6)
    assert order.count("a") == order.count("b") == 3


def test_a_batch_has_jobs_of_one_rule_in_order_up_to_its_size() -> None:
    queue = FairQueue(1, 4)
    a, b, c, d, e = put(queue, job("x", size=2), job("x", "other"), job("x", size=2), job("x"), job("x", size=9))
    order: list[ScoringJob] = []
    for _ in range(5):
        taken = queue.take(order[-1] if order else None)
        assert taken is not None
        queue.end(taken, 0.01)
        order.append(taken)
    assert order == [a, c, b, d, e]
    assert queue.take(e) is None


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(1, 5), st.sampled_from("ptew")),
        max_size=60,
    ),
    st.integers(1, 3),
)
def test_every_job_is_taken_once_or_is_withdrawn_and_nothing_is_left(steps, places: int) -> None:
    queue = FairQueue(places, 4)
    waiting: list[ScoringJob] = []
    under_way: list[ScoringJob] = []
    ended: ScoringJob | None = None
    for client, rule, size, step in steps:
        if step == "p":
            waiting += put(queue, job(client, rule, size))
        elif step == "t" and len(under_way) < places and (taken := queue.take(ended)) is not None:
            waiting.remove(taken)
            under_way.append(taken)
            ended = None
        elif step == "e" and under_way:
            ended = under_way.pop(0)
            queue.end(ended, size / 20)
        elif step == "w" and waiting:
            queue.end(waiting.pop(), 0.0)
    for each in under_way:
        queue.end(each, 1.0)
    while (taken := queue.take()) is not None:
        waiting.remove(taken)
        queue.end(taken, 1.0)
    assert waiting == []
    assert queue.waiting == []
    (last,) = put(queue, job("d"))
    assert queue.take() is last
    queue.end(last, 1.0)
