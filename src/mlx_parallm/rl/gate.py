"""What keeps a version from going live."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from mlx_parallm.core import AdapterRef

Evaluate = Callable[[AdapterRef], Awaitable[bool]]
"""Whether a version that is staged and not live may go live."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """`code`: not_finite, kl_bound or evaluation. `reason`: for people."""

    code: str
    reason: str


class Gate:
    """Every metric is finite; `kl_step` is within `kl_bound`, where there is one; and `evaluate` agrees."""

    def __init__(self, kl_bound: float | None = None, evaluate: Evaluate | None = None) -> None:
        self._kl_bound = kl_bound
        self._evaluate = evaluate

    def judge(self, metrics: Mapping[str, float]) -> Refusal | None:
        """By the figures of the update."""
        if bad := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
            return Refusal("not_finite", f"not finite: {', '.join(bad)}")
        if self._kl_bound is None:
            return None
        moved = metrics.get("kl_step")
        if moved is None:
            return Refusal("kl_bound", "kl_step was not measured, so kl_bound cannot be kept")
        if moved > self._kl_bound:
            return Refusal("kl_bound", f"kl_step {moved:.3g} is above kl_bound {self._kl_bound:g}")
        return None

    @property
    def evaluates(self) -> bool:
        """Whether a version is asked something before it goes live."""
        return self._evaluate is not None

    async def evaluated(self, ref: AdapterRef) -> Refusal | None:
        """By what the version does; an evaluation that fails refuses."""
        if self._evaluate is None:
            return None
        try:
            passed = await self._evaluate(ref)
        except Exception:  # noqa: BLE001 - whatever the prompts ran into, the version has not shown that it is good
            _log.exception("the evaluation of %s failed", ref)
            return Refusal("evaluation", "the evaluation failed; see the log")
        return None if passed else Refusal("evaluation", "the evaluation was not passed")
