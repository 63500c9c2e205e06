"""EvaluationHistory: when versions of one adapter are evaluated, and which one was the best."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager

from mlx_parallm.core import BASE_ADAPTER, AdapterRef, EvaluationResult
from mlx_parallm.rl.evaluation.evaluator import Evaluator
from mlx_parallm.rl.events import Emit

_log = logging.getLogger(__name__)

_STEP, _VERSION, _AT = "eval_step", "eval_version", "eval_at"
_BEST, _KEY = "eval_best", "eval_key"


class EvaluationHistory:
    """The evaluations of one adapter: when the next one is due, the last one, and the best mean so far.

    Args:
        evaluator: None: there are no evaluations.
        every: updates between two evaluations.
        emit: emits events, with the adapter's name.

    Attributes:
        last: the last evaluation of a version that was live then.
        failures: evaluations that failed.
    """

    def __init__(
        self, evaluator: Evaluator | None = None, every: int = 1, emit: Emit = lambda kind, **data: None
    ) -> None:
        self.last: EvaluationResult | None = None
        self.failures = 0
        self._evaluator = evaluator
        self._every = every
        self._emit = emit
        self._counted_from: int | None = None  # the step after which `every` updates are counted
        self._best: float | None = None

    @property
    def enabled(self) -> bool:
        return self._evaluator is not None

    def due(self, step: int) -> bool:
        """Whether a version of this many optimizer steps is to be evaluated: the first one, one that is `every` updates
        after the last evaluation, or one that a rollback has put before it."""
        since = self._counted_from
        return self.enabled and (since is None or not 0 <= step - since < self._every)

    def lacks(self, version: AdapterRef) -> bool:
        """Whether the last evaluation was of another version, or there was none."""
        return self.enabled and (self.last is None or self.last.adapter != version)

    async def evaluate(
        self, version: AdapterRef, step: int, lease: AbstractContextManager[object]
    ) -> EvaluationResult | None:
        """Evaluates a version, live or staged, within its `lease`; see `Evaluator.evaluate`. None: it failed, which is
        logged, emitted and counted."""
        assert self._evaluator is not None
        _log.info("evaluating %s on the held-out tasks", version)
        try:
            with lease:
                result = await self._evaluator.evaluate(version, step)
        except Exception as error:  # noqa: BLE001 - whatever failed, training goes on
            _log.exception("the evaluation of %s failed", version)
            self.failures += 1
            reason = str(error) or type(error).__name__
            self._emit("evaluation_failed", version=str(version), step=step, reason=reason)
            return None
        self._emit("evaluation", version=str(version), step=step, metrics=dict(result.metrics))
        return result

    def add(self, result: EvaluationResult) -> bool:
        """Stores the evaluation of the live version. Returns whether it is the best one so far."""
        self.last, self._counted_from = result, result.step
        if self._best is not None and result.mean <= self._best:
            return False
        self._best = result.mean
        return True

    def postpone(self, step: int) -> None:
        """Call this after an evaluation at this step has failed. The next one is due `every` updates later."""
        self._counted_from = step

    def forget_best(self) -> None:
        """Forgets the best mean, so that the next evaluation is the best one."""
        self._best = None

    def to_metrics(self) -> dict[str, float]:
        """What `restore` needs after a restart, to be saved in a checkpoint's metrics."""
        last = self.last
        if last is None or self._evaluator is None:
            return {}
        place = {
            _STEP: float(last.step),
            _VERSION: float(last.adapter.version),
            _AT: last.at,
            _KEY: self._evaluator.key,
        }
        return {**last.metrics, **place} | ({} if self._best is None else {_BEST: self._best})

    def restore(self, metrics: Mapping[str, float], adapter: str) -> None:
        """Continues from what `to_metrics` returned for this adapter, unless the tasks, the settings or the
        reward of evaluations have changed since then."""
        if self._evaluator is None or metrics.get(_KEY) != self._evaluator.key:
            return
        names = ("eval_mean", "eval_low", "eval_high", "eval_answers", "eval_failed", _STEP, _VERSION, _AT)
        if not metrics.keys() >= set(names):
            return
        mean, low, high, answers, failed, step, version, at = (metrics[name] for name in names)
        ref = AdapterRef(adapter, int(version)) if version else BASE_ADAPTER
        self.last = EvaluationResult(ref, int(step), mean, low, high, int(answers), int(failed), at)
        self._counted_from = int(step)
        self._best = metrics.get(_BEST)
