"""Continuations of `concurrent.futures.Future`, for device work that takes several units.

A continuation runs on the thread that completes the future. On the device thread it need not wait for the event loop,
which would cost a decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, overload

A = TypeVar("A")
B = TypeVar("B")


def complete(future: Future[Any], call: Callable[[], Any]) -> None:
    """Calls `call` and completes `future` with its result or exception. If the result is a future itself, `future`
    is completed when that one is."""
    try:
        result = call()
    except Exception as error:  # noqa: BLE001 - it is raised where the future is awaited
        future.set_exception(error)
        return
    if isinstance(result, Future):
        result.add_done_callback(lambda inner: complete(future, inner.result))
    else:
        future.set_result(result)


@overload
def then(future: Future[A], step: Callable[[A], Future[B]]) -> Future[B]: ...


@overload
def then(future: Future[A], step: Callable[[A], B]) -> Future[B]: ...


def then(future: Future[A], step: Callable[[A], Any]) -> Future[Any]:
    """The future of `step(future.result())`. If `future` fails, `step` is not called and the exception is passed on."""
    following: Future[Any] = Future()
    future.add_done_callback(lambda done: complete(following, lambda: step(done.result())))
    return following


def completed(result: A) -> Future[A]:
    """A future that has this result already."""
    future: Future[A] = Future()
    future.set_result(result)
    return future
