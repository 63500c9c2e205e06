"""Gate: decides by what diverged in an update, and by its evaluation, whether a new version goes live."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.config import Action
from mlx_parallm.core import Divergence, EvaluationResult
from mlx_parallm.rl.events import EVALUATION, Refusal


class Gate:
    """Decides whether a version goes live. It does unless something of its update diverged about which more is done
    than to tell, or its mean reward, if it is evaluated, is below `eval_floor` (None: no floor)."""

    def __init__(self, eval_floor: float | None = None) -> None:
        self._eval_floor = eval_floor

    @property
    def reads_evaluations(self) -> bool:
        """Whether a version that is to be evaluated must be evaluated before it goes live."""
        return self._eval_floor is not None

    def judge(self, diverged: Sequence[Divergence]) -> Refusal | None:
        """Checks what diverged in the update. Returns None if it does not prevent the version from going live."""
        held = [each for each in diverged if each.action != Action.TELL]
        return Refusal(held[0].signal, "; ".join(each.reason for each in held)) if held else None

    def judge_evaluation(self, result: EvaluationResult | None) -> Refusal | None:
        """Checks the evaluation of the version; None: it failed, so the version was not shown to be good."""
        if self._eval_floor is None:
            return None
        if result is None:
            return Refusal(EVALUATION, "the evaluation failed; see the log")
        if result.mean < self._eval_floor:
            return Refusal(EVALUATION, f"the mean reward of {result.mean:.3g} is below eval_floor {self._eval_floor:g}")
        return None
