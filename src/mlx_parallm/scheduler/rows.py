"""Which live rows take part in a decode step, and which one makes way."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows

from mlx_parallm.core import WorkClass
from mlx_parallm.scheduler.sequence import Sequence


def drawing(rows: Rows[Sequence], shares: Mapping[WorkClass, float]) -> list[Sequence]:
    """Those of `rows`, in order of admission, that draw now. Each row more makes a step longer, so beside live
    requests rollouts draw by their share only, one at least, the oldest first; the others keep their rows and wait.
    """
    live = sum(row.work_class is WorkClass.INFERENCE for row in rows)
    if live == 0 or live == len(rows) or shares[WorkClass.INFERENCE] == 0:
        return list(rows)
    places = max(1, int(live * shares[WorkClass.TRAINING] / shares[WorkClass.INFERENCE]))
    rollouts = [row for row in rows if row.work_class is WorkClass.TRAINING]
    waiting = set(map(id, rollouts[places:]))
    return [row for row in rows if id(row) not in waiting]


def victim(rows: Rows[Sequence]) -> Sequence:
    """Whose memory others get: the youngest rollout, or else the youngest of all. `rows`: in order of admission."""
    rollouts = [row for row in rows if row.work_class is WorkClass.TRAINING]
    return (rollouts or rows)[-1]
