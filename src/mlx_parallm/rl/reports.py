"""What came of each update: reports, counts and events of one adapter."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from mlx_parallm.core import AdapterRef, UpdateReport
from mlx_parallm.rl.gate import Refusal
from mlx_parallm.rl.samples import UpdateOutcome

_log = logging.getLogger(__name__)


class Emit(Protocol):
    """Tells listeners of an event; see `core.TrainingEvent`."""

    def __call__(self, kind: str, **data: object) -> None: ...


class Reporter:
    """`step`, `metrics`: of the last update that was learnt. `skips`: by reason, held ones too."""

    def __init__(self, name: str, emit: Emit) -> None:
        self.step = 0
        self.metrics: Mapping[str, float] = {}
        self.updates = 0
        self.skips: Counter[str] = Counter()
        self._name = name
        self._emit = emit

    def learnt(self, status: str, ref: AdapterRef | None, outcome: UpdateOutcome) -> UpdateReport:
        """`status`: published or trained; `ref`: what is live now."""
        self.step, self.metrics = outcome.step, outcome.metrics
        self.updates += 1
        return self._told("update", UpdateReport(ref, outcome.step, status, metrics=outcome.metrics))

    def held(self, ref: AdapterRef | None, refusal: Refusal, outcome: UpdateOutcome) -> UpdateReport:
        self.skips[f"held_{refusal.code}"] += 1
        _log.warning("an update of %s was held: %s", self._name, refusal.reason)
        return self._told("held", UpdateReport(ref, self.step, "held", refusal.reason, _finite(outcome.metrics)))

    def skipped(
        self, ref: AdapterRef | None, code: str, reason: str = "", metrics: Mapping[str, float] | None = None
    ) -> UpdateReport:
        """`code` is counted; `reason`, where it says more, is what people read."""
        self.skips[code] += 1
        _log.info("an update of %s was skipped: %s", self._name, reason or code)
        return self._told("skipped", UpdateReport(ref, self.step, "skipped", reason or code, _finite(metrics or {})))

    def _told(self, kind: str, report: UpdateReport) -> UpdateReport:
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
