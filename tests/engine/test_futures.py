"""Continuations of futures run on the completing thread, and every error reaches the last future."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from mlx_parallm.core.device import complete, completed, then


def failed(error: Exception) -> Future[int]:
    future: Future[int] = Future()
    future.set_exception(error)
    return future


def raising(_: int) -> int:
    raise KeyError("step")


def test_a_step_may_return_a_value_or_another_future() -> None:
    assert then(completed(1), lambda value: value + 1).result(timeout=0) == 2
    later: Future[int] = Future()
    chained = then(then(completed(1), lambda value: later), lambda value: value * 2)
    assert not chained.done()
    later.set_result(4)
    assert chained.result(timeout=0) == 8


@pytest.mark.parametrize(
    ("future", "step"),
    [
        (failed(KeyError("first")), lambda value: value),
        (completed(1), raising),
        (completed(1), lambda value: failed(KeyError("later"))),
    ],
)
def test_the_error_of_any_part_is_the_error_of_the_whole(future: Future[int], step) -> None:
    called: list[int] = []
    whole = then(then(future, step), called.append)
    assert isinstance(whole.exception(timeout=0), KeyError)
    assert called == []


def test_a_step_runs_on_the_thread_that_completes_the_future() -> None:
    first: Future[int] = Future()
    name = then(first, lambda _: threading.current_thread().name)
    thread = threading.Thread(target=first.set_result, args=(1,), name="completing")
    thread.start()
    thread.join()
    assert name.result(timeout=0) == "completing"


def test_complete_takes_the_result_of_a_call() -> None:
    plain, nested = Future[int](), Future[int]()
    complete(plain, lambda: 1)
    complete(nested, lambda: completed(2))
    assert (plain.result(timeout=0), nested.result(timeout=0)) == (1, 2)
