"""AdapterTrainingParts: the objects that the training of every adapter uses."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_parallm.adapters.service import AdapterService
from mlx_parallm.config import CheckpointingConfig, ResolvedTraining
from mlx_parallm.rl.evaluation.evaluator import Evaluator
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.learn.learner import Learner
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.updates.checkpoints import PolicyCheckpoints, PolicyOf
from mlx_parallm.rl.updates.gate import Gate


@dataclass(frozen=True, slots=True)
class AdapterTrainingParts:
    """The objects that the training of every adapter uses.

    `policy_of`: makes a policy from a version that was not trained here. None: only adapters that were trained here can
    be trained further.
    `evaluator`: asks versions the held-out tasks. None: versions are not evaluated.
    """

    learner: Learner
    adapters: AdapterService
    checkpoints: PolicyCheckpoints
    gate: Gate
    config: ResolvedTraining
    checkpointing: CheckpointingConfig
    emit: Emit
    policy_of: PolicyOf | None = None
    evaluator: Evaluator | None = None
    journal: Journal = field(default_factory=Journal)
