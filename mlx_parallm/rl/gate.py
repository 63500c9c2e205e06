"""Gate: decides by the metrics of an update, and by its evaluation, whether a new version goes live."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mlx_parallm.core import EvaluationResult
from mlx_parallm.rl.events import Refusal


class Gate:
    """Decides whether a version goes live. It does if all metrics of its update are finite, `kl_step` does not exceed
    `kl_bound` (None: no bound), and its mean reward, if it is evaluated, is not below `eval_floor` (None: no floor)."""

    def __init__(self, kl_bound: float | None = None, eval_floor: float | None = None) -> None:
        self._kl_bound = kl_bound
        self._eval_floor = eval_floor

    @property
    def reads_evaluations(self) -> bool:
        """Whether a version that is to be evaluated must be evaluated before it goes live."""
        return self._eval_floor is not None

    def judge(self, metrics: Mapping[str, float]) -> Refusal | None:
        """Checks the metrics of the update. Returns None if they do not prevent the version from going live."""
        if bad := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
            return Refusal("not_finite", f"not finite: {', '.join(bad)}")
        if self._kl_bound is None:
            return None
        kl = metrics.get("kl_step")
        if kl is None:
            return Refusal("kl_bound", "kl_step was not measured, so kl_bound cannot be checked")
        if kl > self._kl_bound:
            return Refusal("kl_bound", f"kl_step {kl:.3g} is above kl_bound {self._kl_bound:g}")
        return None

    def judge_evaluation(self, result: EvaluationResult | None) -> Refusal | None:
        """Checks the evaluation of the version; None: it failed, so the version was not shown to be good."""
        if self._eval_floor is None:
            return None
        if result is None:
            return Refusal("evaluation", "the evaluation failed; see the log")
        if result.mean < self._eval_floor:
            return Refusal(
                "evaluation", f"the mean reward of {result.mean:.3g} is below eval_floor {self._eval_floor:g}"
            )
        return None
