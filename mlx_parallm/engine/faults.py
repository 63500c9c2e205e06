"""Recovery from faults, which are errors in work on the device thread. Only `Engine.surviving` catches them.

If the failing call was training, the update fails and no row is affected; if it was the draft model, rows go on without
its guesses. Otherwise the requests for which the call was made fail. All other rows are computed again on fresh arrays,
and cached prefixes are forgotten, because the failing call may have left wrong values in the arrays that it was
writing, which hold the blocks of all rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

from mlx_parallm.errors import DeviceLostError, DeviceMemoryError, EngineError, StepFailedError
from mlx_parallm.model.device import check_device, is_out_of_memory

if TYPE_CHECKING:
    from mlx_parallm.batch.runner import BatchRunner
    from mlx_parallm.core import TrainingWork
    from mlx_parallm.engine.engine import Engine
    from mlx_parallm.engine.requests import Request, Requests
    from mlx_parallm.engine.scheduler import RLAwareScheduler
    from mlx_parallm.engine.speculation.draft_model import DraftModel

_log = logging.getLogger(__name__)

_MAX_FAULTS_IN_A_ROW = 8
"""The device counts as lost after more faults in a row than this, none of which failed a request."""

_MAX_RECOMPUTED = 3
"""How often other requests' faults may make a request start again before its next token; after that it fails too."""


class Work(Protocol):
    """Work on the device that belongs to no request: that of `AdapterStore`, `GRPOTrainer` or `DraftModel`."""

    def reset(self) -> None:
        """Gives up what failed, and everything that it left half done on the device."""


Affected: TypeAlias = "tuple[tuple[Request, ...], Work | None]"
"""What a fault affects: these requests, or this work."""


class FaultScope:
    """Records for which requests or work MLX is being called, so that a fault fails only those. Device thread only."""

    def __init__(self) -> None:
        self._affected: Affected = ((), None)

    @contextmanager
    def covering(self, requests: Iterable[Request] = (), work: Work | None = None) -> Iterator[None]:
        """A fault in this block affects these requests or this work. If the block raises, they stay recorded until
        `take`."""
        before, self._affected = self._affected, (tuple(requests), work)
        yield
        self._affected = before

    def take(self) -> Affected:
        """Returns the recorded requests or work, and clears the record."""
        affected, self._affected = self._affected, ((), None)
        return affected


class Recovery:
    """Restores a consistent state after a fault. Device thread only."""

    def __init__(
        self,
        engine: Engine,
        scope: FaultScope,
        runner: BatchRunner,
        requests: Requests,
        scheduler: RLAwareScheduler,
        training: TrainingWork | None,
        draft_model: DraftModel | None,
    ) -> None:
        self._engine = engine
        self._scope = scope
        self._runner = runner
        self._requests = requests
        self._scheduler = scheduler
        self._training = training
        self._draft_model = draft_model
        self._in_a_row = 0

    def went_well(self) -> None:
        """Resets the count of faults in a row, after a unit without a fault."""
        self._in_a_row = 0

    def survive(self, error: Exception) -> None:
        """Recovers from `error`. Recovery calls MLX itself; if that raises, it is one more fault.

        Raises:
            DeviceLostError: `error` is one, or there were too many faults in a row, and none of them failed a request.
        """
        if isinstance(error, DeviceLostError):
            raise error
        _log.error("a unit of device work failed", exc_info=error)
        self._in_a_row += 1
        if self._in_a_row > _MAX_FAULTS_IN_A_ROW:
            raise DeviceLostError(
                f"the device failed {self._in_a_row} times in a row, whatever it was given"
            ) from error
        try:
            self._recover(error)
        except Exception as another:  # noqa: BLE001 - the thread survives a failed recovery and tries again
            self.survive(another)

    def _recover(self, error: Exception) -> None:
        affected, work = self._scope.take()
        if work is not None and work is self._training:
            self._give_up_update()
            return
        self._requests.counters.failed_steps += 1
        if self._draft_model is not None and work is self._draft_model and not self._engine.in_flight:
            self._draft_model.reset()  # it writes its own arrays only
            self._in_a_row = 0
            return
        failing = self._requests_to_fail(error, affected)
        failed = [self._requests.fail(request, _explained(error)) for request in failing]
        self._recompute_rows(error)
        if work is not None:
            work.reset()
        self._requests.flush()
        self._scheduler.check_integrity()  # a failed check is one more fault, and ends the thread if it keeps failing
        self._requests.check_integrity()
        check_device()  # an error that the fault left behind surfaces here, where it fails no request
        if any(failed):
            self._in_a_row = 0

    def _give_up_update(self) -> None:
        """Gives up the update whose unit failed. No row is affected: training writes its own arrays only."""
        assert self._training is not None
        self._requests.counters.failed_training_units += 1
        self._training.reset()
        self._in_a_row = 0

    def _requests_to_fail(self, error: Exception, affected: Iterable[Request]) -> set[Request]:
        """The requests for which the failing call was made, or, if the error may be that of the forward unit in flight,
        the requests of that unit.

        Metal reports the error of a command buffer at the next call, whatever that call is. If the requests of the unit
        in flight fail for that reason, `affected` start again.
        """
        if not self._engine.in_flight:
            return set(affected)
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            return self._engine.drop_in_flight()
        self._engine.commit()
        return set(affected)

    def _recompute_rows(self, error: Exception) -> None:
        self._engine.drop_in_flight()
        disturbed = {sequence.request for sequence in self._scheduler.live}
        for sequence in self._scheduler.live:
            self._scheduler.preempt(sequence)
        for each in self._requests.sequences():
            each.forget_unread()
        self._runner.clear()
        for request in disturbed:
            request.recomputed += 1
            if request.recomputed > _MAX_RECOMPUTED:
                self._requests.fail(request, _explained(error))


def _explained(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    if is_out_of_memory(error):
        return DeviceMemoryError("the device ran out of memory while computing this request")
    return StepFailedError(f"the model failed while computing this request: {type(error).__name__}")
