"""What a fault on the device thread costs. `DeviceLoop.surviving` is the one place that catches it.

A fault costs the requests that the failing call was made for, or the update of training. Every other row is computed
again on fresh arrays: arrays that a failed call was to write cannot be trusted, nor those that share a slab with them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.core import TrainingWork
from mlx_parallm.engine.decoding import Decoder
from mlx_parallm.engine.ledger import Ledger
from mlx_parallm.engine.live import LiveRequest
from mlx_parallm.errors import DeviceLostError, DeviceMemoryError, EngineError, StepFailedError
from mlx_parallm.model.device import check_device, is_out_of_memory
from mlx_parallm.scheduler.rl_aware import RLAwareScheduler

_log = logging.getLogger(__name__)

_MOST_IN_A_ROW = 8
"""Faults that cost nobody anything, one after the other, before the device is given up."""

_MOST_RECOMPUTED = 3
"""How often a request starts again after faults of others without a token in between, before it fails too."""


class Recovery:
    """Brings the loop back to a state that it can go on from. Device thread only."""

    def __init__(
        self,
        runner: BatchRunner,
        decoder: Decoder,
        ledger: Ledger,
        scheduler: RLAwareScheduler,
        adapters: AdapterStore,
        training: TrainingWork | None,
    ) -> None:
        self._runner = runner
        self._decoder = decoder
        self._ledger = ledger
        self._blame = ledger.blame
        self._scheduler = scheduler
        self._adapters = adapters
        self._training = training
        self._in_a_row = 0

    def went_well(self) -> None:
        """A unit has ended without a fault."""
        self._in_a_row = 0

    def survive(self, error: Exception) -> None:
        """Recovers from `error`. Recovering calls MLX too, so what it raises is one fault more.

        Raises:
            DeviceLostError: too many faults in a row had nobody to blame.
        """
        _log.error("a unit of device work failed", exc_info=error)
        self._in_a_row += 1
        if self._in_a_row > _MOST_IN_A_ROW:
            raise DeviceLostError(
                f"the device failed {self._in_a_row} times in a row, whatever it was given"
            ) from error
        try:
            self._recover(error)
        except Exception as another:  # noqa: BLE001 - the thread survives a failed recovery: it is tried again
            self.survive(another)

    def _recover(self, error: Exception) -> None:
        blamed, work = self._blame.take()
        if work is not None and work is self._training:
            self._give_up_update()
            return
        self._ledger.counters.failed_steps += 1
        guilty = self._guilty(error, blamed)
        failed = [self._ledger.fail(request, _explained(error)) for request in guilty]
        self._recompute_rows(error)
        if work is not None:
            self._adapters.reset()
        self._ledger.flush()
        self._scheduler.check_integrity()  # books that disagree are one fault more, and end the thread if they stay so
        self._ledger.check_integrity()
        check_device()  # what is left of the fault surfaces here, where it costs nobody
        if any(failed):
            self._in_a_row = 0

    def _give_up_update(self) -> None:
        """A failed unit of training costs its update and no row: it writes arrays of its own and evaluates none of the
        pool's."""
        assert self._training is not None
        self._ledger.counters.failed_training_units += 1
        self._training.reset()
        self._in_a_row = 0

    def _guilty(self, error: Exception, asked: Iterable[LiveRequest]) -> set[LiveRequest]:
        """The requests that pay. With a step in flight the error may be that step's, since an error of a Metal command
        buffer surfaces at the next call, whatever that is; then whoever the call was made for starts again."""
        if not self._decoder.in_flight:
            return set(asked)
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            return self._decoder.drop()
        self._decoder.commit()
        return set(asked)

    def _recompute_rows(self, error: Exception) -> None:
        self._decoder.drop()
        disturbed = {self._ledger.live(sequence).request for sequence in self._scheduler.live}
        for sequence in self._scheduler.live:
            self._scheduler.preempt(sequence)
        for live in self._ledger.lives():
            live.forget_unread()
        self._runner.clear()
        for request in disturbed:
            request.recomputed += 1
            if request.recomputed > _MOST_RECOMPUTED:
                self._ledger.fail(request, _explained(error))


def _explained(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    if is_out_of_memory(error):
        return DeviceMemoryError("the device ran out of memory while computing this request")
    return StepFailedError(f"the model failed while computing this request: {type(error).__name__}")
