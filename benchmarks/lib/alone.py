"""Runs a part of a benchmark in its own process, so that parts share neither memory nor MLX's state."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def alone(measure: Callable[..., T], *arguments: Any) -> T:
    """Calls `measure` in a new process and returns or raises its result. An interrupt kills the new process too."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        try:
            return executor.submit(measure, *arguments).result()
        except BaseException:  # an interrupt too, because the child must not outlive this process
            for child in multiprocessing.active_children():
                child.kill()
            raise
