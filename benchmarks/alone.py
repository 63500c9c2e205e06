"""A part of a benchmark in a process of its own, so that parts share neither memory nor MLX's state."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def alone(measure: Callable[..., T], *arguments: Any) -> T:
    """What `measure` returns, or raises, by pickle. The process is killed when this one is interrupted."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        try:
            return executor.submit(measure, *arguments).result()
        except BaseException:  # an interrupt above all: the child must not outlive it
            for child in multiprocessing.active_children():
                child.kill()
            raise
