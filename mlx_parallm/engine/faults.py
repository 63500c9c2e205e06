"""Recovery from faults, which are errors in work on the device thread. Only `Engine.surviving` catches them.

If the failing call was training, the update fails and no row is affected; if it was the draft model, rows go on without
its drafts. Otherwise the requests for which the call was made fail. All other rows are computed again on fresh arrays,
and cached prefixes are forgotten, because the failing call may have left wrong values in the arrays that it was
writing, which hold the blocks of all rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from mlx_parallm.errors import DeviceLostError, DeviceMemoryError, EngineError, StepFailedError
from mlx_parallm.model.device import check_device, is_out_of_memory

if TYPE_CHECKING:
    from mlx_parallm.adapters.residency import AdapterStore
    from mlx_parallm.core.device import TrainingWork
    from mlx_parallm.engine.draft_model import DraftModel
    from mlx_parallm.engine.engine import Engine
    from mlx_parallm.engine.requests import Request

_log = logging.getLogger(__name__)

_MAX_FAULTS_IN_A_ROW = 8
"""The device counts as lost after more faults in a row than this, none of which failed a request."""

_MAX_RECOMPUTED = 3
"""How often other requests' faults may make a request start again before its next token; after that it fails too."""


class UnitError(Exception):
    """An error of work on the device, with what it affects: these requests, or this work, which belongs to none."""

    def __init__(
        self, error: Exception, requests: Iterable[Request], work: AdapterStore | TrainingWork | DraftModel | None
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.requests = set(requests)
        self.work = work


class Affecting:
    """A block in which MLX is called for these requests or this work. An error in it is raised as a `UnitError`, which
    affects them, unless a block inside this one has raised it as one already."""

    __slots__ = ("_requests", "_work")

    def __init__(
        self, requests: Iterable[Request] = (), work: AdapterStore | TrainingWork | DraftModel | None = None
    ) -> None:
        self._requests = requests
        self._work = work

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, UnitError):
            raise UnitError(error, self._requests, self._work) from error


class Recovery:
    """Restores a consistent state of an engine after a fault. Device thread only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._in_a_row = 0

    def went_well(self) -> None:
        """Resets the count of faults in a row, after a unit without a fault."""
        self._in_a_row = 0

    def survive(self, error: Exception) -> None:
        """Recovers from `error`. Recovery calls MLX itself; if that raises, it is one more fault.

        Raises:
            DeviceLostError: `error` is one, or there were too many faults in a row, and none of them failed a request.
        """
        fault = error if isinstance(error, UnitError) else UnitError(error, (), None)
        if isinstance(fault.error, DeviceLostError):
            raise fault.error
        _log.error("a unit of device work failed", exc_info=fault.error)
        self._in_a_row += 1
        if self._in_a_row > _MAX_FAULTS_IN_A_ROW:
            raise DeviceLostError(
                f"the device failed {self._in_a_row} times in a row, whatever it was given"
            ) from fault.error
        try:
            self._recover(fault)
        except Exception as another:  # noqa: BLE001 - the thread survives a failed recovery and tries again
            self.survive(another)

    def _recover(self, fault: UnitError) -> None:
        engine = self._engine
        if fault.work is not None and fault.work is engine.training:
            engine.counters.failed_training_units += 1
            engine.training.reset()  # it writes its own arrays only
            self._in_a_row = 0
            return
        engine.counters.failed_steps += 1
        if fault.work is not None and fault.work is engine.draft_model and not engine.in_flight:
            engine.draft_model.reset()  # it writes its own arrays only
            self._in_a_row = 0
            return
        failed = self._fail_requests(fault)
        self._recompute_rows(fault.error)
        if fault.work is not None:
            fault.work.reset()
        engine.scheduler.check_integrity()  # a failed check is one more fault, and ends the thread if it keeps failing
        engine.requests.check_integrity()
        check_device()  # an error that the fault left behind surfaces here, where it fails no request
        if failed:
            self._in_a_row = 0

    def _fail_requests(self, fault: UnitError) -> bool:
        """Fails the requests for which the failing call was made, or, if the error may be that of the forward unit in
        flight, the requests of that unit. Returns whether any of them had not ended before.

        Metal reports the error of a command buffer at the next call, whatever that call is. If the requests of the unit
        in flight fail for that reason, those of the fault start again, except for those that have nothing to start.
        """
        engine, failing = self._engine, fault.requests
        try:
            if engine.in_flight:
                if isinstance(fault.error, RuntimeError) and not is_out_of_memory(fault.error):
                    failing = engine.drop_in_flight() | {each for each in failing if not engine.requests.goes_on(each)}
                else:
                    engine.commit()
        finally:  # even if the unit in flight fails too, because recovery then goes on with that fault
            failed = [engine.requests.fail(request, explained(fault.error)) for request in failing]
        return any(failed)

    def _recompute_rows(self, error: Exception) -> None:
        engine = self._engine
        engine.drop_in_flight()
        disturbed = {sequence.request for sequence in engine.scheduler.live}
        for sequence in engine.scheduler.live:
            engine.scheduler.preempt(sequence)
        for each in engine.requests.sequences:
            each.forget_unread()
        engine.runner.clear()
        for request in disturbed:
            request.recomputed += 1
            if request.recomputed > _MAX_RECOMPUTED:
                engine.requests.fail(request, explained(error))


def explained(error: Exception) -> EngineError:
    """The error of a server fault, as clients get it."""
    if isinstance(error, EngineError):
        return error
    if is_out_of_memory(error):
        return DeviceMemoryError("the device ran out of memory while computing this request")
    return StepFailedError(f"the model failed while computing this request: {type(error).__name__}")
