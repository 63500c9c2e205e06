"""The device thread: how its time is shared, what may run on it, and how the event loop reaches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar, overload

from mlx_parallm.core.requests import WorkClass

T = TypeVar("T")
U = TypeVar("U")

MODE_SHARES: Mapping[str, float] = {"inference_and_training": 0.12, "training_priority": 0.5}
"""The default `training_time_share` of each mode in which a server both serves and trains."""


@dataclass(frozen=True, slots=True)
class DeviceSchedule:
    """How requests and training share the device. A new schedule takes effect between two units of device work.

    Attributes:
        training_time_share: share of device time for training while rows decode, in (0, 1]. Training also gets all
            idle time.
        max_decode_stall_s: seconds by which other work may delay a decode step, > 0. Chunks of prompts in the step and
            units of training before it are cut so that their predicted time fits, and are not interrupted. A stall can
            still be longer by the smallest of these: 16 tokens of a prompt, and for training one layer of one
            micro-step (`micro_batch_tokens` tokens, or one sample if that is longer) or 256 positions of its head.
            Every few steps a prompt gets a chunk even if it is predicted not to fit.
        row_shares: share of each work class, summing to 1. While sequences of both classes wait, they share the rows
            of the batch; while rows of both classes are live, they share the rows of a decode step. A class that is
            alone gets all.
    """

    training_time_share: float = MODE_SHARES["inference_and_training"]
    max_decode_stall_s: float = 0.5
    row_shares: Mapping[WorkClass, float] = field(
        default_factory=lambda: {WorkClass.INFERENCE: 0.7, WorkClass.TRAINING: 0.3}
    )


class PauseMode(StrEnum):
    """What happens to running requests when the engine pauses. The values are vLLM's."""

    ABORT = "abort"
    """They fail at once."""
    WAIT = "wait"
    """They run to their end."""
    KEEP = "keep"
    """They stop where they are, and continue after the pause."""


class DeviceThread(Protocol):
    """The one thread that owns MLX, seen from the event loop."""

    @overload
    async def run(self, call: Callable[[], Future[T]]) -> T: ...

    @overload
    async def run(self, call: Callable[[], T]) -> T: ...

    async def run(self, call: Callable[[], T | Future[T]]) -> T:
        """Runs `call` on the device thread between two units and returns its result.

        If `call` returns a future, because its work continues in later units, waits for it and returns its result.
        `call` may use MLX, but must not write arrays that rows read. Cancelling the caller does not stop the call.

        Raises:
            Exception: raised by `call` or set on its future; requests and other calls are not affected.
            EngineDeadError: the device thread has stopped.
        """


class DeviceWork(Protocol):
    """Work on the device thread other than requests, cut into units that are short enough to run between steps."""

    def waits(self) -> bool:
        """Whether `advance` has a unit to run. Cheap; does not use the device."""

    def advance(self) -> None:
        """Runs one unit. It is called only while no forward unit is in flight.

        Raises:
            Exception: any error of the device; the engine then calls `reset`. After a failure in staging, whose
                arrays rows read, the engine also removes all rows from the device before `reset` and computes them
                again afterwards.
        """

    def reset(self) -> None:
        """Gives up the unit that failed and everything that it left half done on the device."""

    @property
    def bytes_held(self) -> int:
        """Device memory that the work holds, plus what its next unit will allocate. Does not use the device."""


class TrainingWork(DeviceWork, Protocol):
    """Adapter updates as device work."""

    def pace(self, seconds: float) -> None:
        """Limits the length of the next unit to `seconds`, if the work can be cut that small."""

    @property
    def bytes_of_updates(self) -> int:
        """Device memory that is held beside `bytes_held` while updates wait: gradients and a micro-step's arrays."""

    @property
    def peak_bytes(self) -> int:
        """Peak device memory of the process since start. MLX's own counter is reset when a unit is measured."""


# ---- results of work that takes several units --------------------------------------------------

# A continuation runs on the thread that completes the future. On the device thread it need not wait for the event loop,
# which would cost a decode step.


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
def then(future: Future[T], step: Callable[[T], Future[U]]) -> Future[U]: ...


@overload
def then(future: Future[T], step: Callable[[T], U]) -> Future[U]: ...


def then(future: Future[T], step: Callable[[T], Any]) -> Future[Any]:
    """The future of `step(future.result())`. If `future` fails, `step` is not called and the exception is passed on."""
    following: Future[Any] = Future()
    future.add_done_callback(lambda done: complete(following, lambda: step(done.result())))
    return following


def completed(result: T) -> Future[T]:
    """A future that has this result already."""
    future: Future[T] = Future()
    future.set_result(result)
    return future
