"""What becomes of an update: whether its version goes live, its report, and whether updates go on by themselves."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass

from mlx_parallm.config import Action
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import StorageError
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.status import Divergence, EvaluationResult, UpdateReport, UpdateStatus
from mlx_parallm.train.data import UpdateOutcome

_EVALUATION = "evaluation"
_MINUTE = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a version does not go live. `code`: evaluation, or the signal that diverged. `reason`: the same in words."""

    code: str
    reason: str


def refusal_of(diverged: Sequence[Divergence]) -> Refusal | None:
    """The gate, after an update: a version goes live unless something diverged that is more than reported."""
    held = [each for each in diverged if each.action != Action.TELL]
    return Refusal(held[0].signal, "; ".join(each.reason for each in held)) if held else None


def refusal_of_evaluation(result: EvaluationResult | None, eval_floor: float | None) -> Refusal | None:
    """The gate, after an evaluation: the mean reward must reach the floor, if there is one. `result` None: the
    evaluation failed, so the version was not shown to be good."""
    if eval_floor is None:
        return None
    if result is None:
        return Refusal(_EVALUATION, "the evaluation failed; see the log")
    if result.mean < eval_floor:
        return Refusal(_EVALUATION, f"the mean reward of {result.mean:.3g} is below eval_floor {eval_floor:g}")
    return None


class UpdateReporter:
    """Makes the reports of one adapter's updates, counts them, and emits each as an event.

    Attributes:
        step, metrics: of the last update that changed the policy.
        updates: updates that changed the policy.
        last_update: time of the last of them, in Unix seconds.
        skips: updates that were skipped or held, by reason.
    """

    def __init__(self, name: str, emit: Emit) -> None:
        self.step = 0
        self.metrics: Mapping[str, float] = {}
        self.updates = 0
        self.last_update: float | None = None
        self.skips: Counter[str] = Counter()
        self._name = name
        self._emit = emit
        self._times: deque[float] = deque()  # of the updates in the last minute, monotonic

    @property
    def updates_per_second(self) -> float:
        """Updates that changed the policy, per second over the last minute."""
        since = time.monotonic() - _MINUTE
        return sum(at >= since for at in self._times) / _MINUTE

    def updated(self, status: UpdateStatus, live: AdapterRef | None, outcome: UpdateOutcome) -> UpdateReport:
        """Reports an update that changed the policy. `status`: published or trained. `live`: the live version now."""
        self.step, self.metrics = outcome.step, outcome.metrics
        self.updates += 1
        self.last_update = time.time()
        now = time.monotonic()
        self._times.append(now)
        while self._times[0] < now - _MINUTE:
            self._times.popleft()
        return self._report("update", UpdateReport(live, outcome.step, status, metrics=outcome.metrics))

    def held(self, live: AdapterRef | None, refusal: Refusal, outcome: UpdateOutcome) -> UpdateReport:
        """Reports an update that the gate refused."""
        self.skips[f"held_{refusal.code}"] += 1
        if refusal.code == _EVALUATION:  # what has diverged is logged by its watch
            _log.warning("an update of %s was held: %s", self._name, refusal.reason)
        return self._report("held", UpdateReport(live, self.step, "held", refusal.reason, _finite(outcome.metrics)))

    def skipped(
        self, live: AdapterRef | None, code: str, reason: str = "", metrics: Mapping[str, float] | None = None
    ) -> UpdateReport:
        """Reports that no update was made. `code`: the reason under which it is counted. `reason`: an explanation."""
        self.skips[code] += 1
        _log.info("an update of %s was skipped: %s", self._name, reason or code)
        return self._report("skipped", UpdateReport(live, self.step, "skipped", reason or code, _finite(metrics or {})))

    def _report(self, kind: str, report: UpdateReport) -> UpdateReport:
        self._emit(
            kind,
            adapter=self._name,
            version=str(report.adapter) if report.adapter else None,
            step=report.step,
            status=report.status,
            reason=report.reason,
            metrics=dict(report.metrics),
        )
        return report


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


# ---- pauses --------------------------------------------------------------------------------------


class Pausing:
    """Pauses automatic updates: when asked, after `most_failures` updates in a row that were skipped or held, while the
    journal cannot be written, and while the machine should not train.

    Attributes:
        failures: updates in a row that were skipped or held.
    """

    def __init__(self, name: str, emit: Emit, most_failures: int) -> None:
        self.failures = 0
        self._name = name
        self._emit = emit
        self._most_failures = most_failures
        self._paused: str | None = None  # until `resume`
        self._held = ""  # until the machine may train again

    @property
    def reason(self) -> str | None:
        """Why they are paused; None: they are not."""
        return self._paused or self._held or None

    def _change(self, paused: str | None, held: str) -> None:
        before, self._paused, self._held = self.reason, paused, held
        if self.reason == before:
            return
        if self.reason is None:
            self._emit("resumed", adapter=self._name)
        else:
            self._emit("paused", adapter=self._name, reason=self.reason)

    def pause(self, reason: str) -> None:
        self._change(self._paused or reason, self._held)

    def hold(self, reason: str) -> None:
        """Pauses updates until the next call, with "" for the reason."""
        self._change(self._paused, reason)

    def resume(self) -> bool:
        """Ends a pause, but not `hold`. Returns whether there was one."""
        if self._paused is None:
            return False
        self.failures = 0
        self._change(None, self._held)
        return True

    def succeeded(self) -> None:
        self.failures = 0

    def failed(self, reason: str) -> None:
        """An update was skipped or held."""
        self.failures += 1
        if self.failures >= self._most_failures:
            self.pause(f"{self.failures} updates in a row were skipped or held, the last one: {reason}")

    async def recorded(self, writing: Coroutine[None, None, None]) -> None:
        """Waits until a change is in the journal. If that fails, updates pause: the change is made, and the next one
        has to wait until the disk takes it."""
        try:
            await writing
        except StorageError as error:
            self.pause(str(error))
