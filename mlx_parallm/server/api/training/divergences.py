"""The response object of a divergence."""

from __future__ import annotations

from mlx_parallm.core import Divergence
from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.api.training.values import finite, utc


class DivergenceObject(WireOutput):
    """A figure of training that is beyond its limit."""

    signal: str
    """`not_finite`, `kl_step`, `ratio`, `kl`, `entropy`, `length` or `reward`."""
    value: float | None
    """The figure; null if it is not finite."""
    limit: float | None
    """Its limit; null for `not_finite`."""
    action: str
    """What was done: `tell`, `hold`, `pause` or `roll_back`."""
    reason: str
    """The same in words."""
    at: str
    """Time in ISO-8601, UTC."""


def divergence_object(found: Divergence) -> DivergenceObject:
    return DivergenceObject(
        signal=found.signal,
        value=finite(found.value),
        limit=found.limit,
        action=found.action,
        reason=found.reason,
        at=utc(found.at),
    )
