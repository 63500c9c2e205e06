"""EngineParts: what the engine of one base model is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.batch.kv.disk import PrefixStore
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.core import TrainingWork
from mlx_parallm.engine.live import Vocabulary
from mlx_parallm.engine.speculation.draft_model import DraftModel
from mlx_parallm.engine.speculation.guesses import Source
from mlx_parallm.model.device import MemoryLimits
from mlx_parallm.scheduler.cost import CostModel
from mlx_parallm.scheduler.scheduler import SchedulerConfig


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of the engine, which the device thread builds before it serves.

    `base`: the base model's name. `training`: None if this server does not train. `lookahead`: see `Forwards`.
    `guesses_from`: where the tokens of drafts come from; nothing: rows have no drafts. `draft_model`: the one that
    `Source.MODEL` means.
    `queue_timeout_s`: longest time that an inference request may wait for its first forward unit; None for no limit.
    `limits`: the limits set on MLX's memory, for `/debug/state`. `prefix_store`: None if cached prefixes are kept in
    memory only. `trace` and `check_every_unit`: see `config.DebugConfig`.
    """

    runner: BatchRunner
    adapters: AdapterStore
    vocabulary: Vocabulary
    scheduler: SchedulerConfig
    cost: CostModel
    training: TrainingWork | None = None
    lookahead: bool = True
    guesses_from: frozenset[Source] = frozenset()
    draft_model: DraftModel | None = None
    queue_timeout_s: float | None = None
    limits: MemoryLimits | None = None
    prefix_store: PrefixStore | None = None
    trace: Path | None = None
    check_every_unit: bool = False
    base: str = ""
