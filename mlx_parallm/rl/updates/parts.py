"""What training is made of: the objects of the whole service, and those that the training of every adapter uses."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_parallm.adapters.service import AdapterService
from mlx_parallm.config import CheckpointingConfig, ResolvedTraining
from mlx_parallm.rl.evaluation.evaluator import Evaluator
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.scoring.service import ScoringService
from mlx_parallm.rl.tasks import FileTasks
from mlx_parallm.rl.teachers import Teacher
from mlx_parallm.rl.trajectory_log import TrajectoryLog
from mlx_parallm.rl.updates.checkpoints import PolicyCheckpoints, PolicyOf
from mlx_parallm.rl.updates.gate import Gate
from mlx_parallm.train.learner import Learner


@dataclass(frozen=True, slots=True)
class AdapterTrainingParts:
    """The objects that the training of every adapter uses.

    `policy_of`: makes a policy from a version that was not trained here. None: only adapters that were trained here can
    be trained further.
    `evaluator`: asks versions the held-out tasks. None: versions are not evaluated.
    `teacher`: what distillation imitates. None: the loss has none.
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
    teacher: Teacher | None = None


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """What training is made of.

    `evaluator`: asks versions the held-out tasks. `policy_of`: gives the policy that training starts from
    if the live version has no checkpoint of a trainer. `log`: gets every trajectory in the end. `tasks`: have the
    answers that requests leave out. `journal`: of the run; it is closed with the service. `teacher`: what distillation
    imitates.
    """

    learner: Learner
    adapters: AdapterService
    checkpoints: PolicyCheckpoints
    scorers: ScoringService
    config: ResolvedTraining
    checkpointing: CheckpointingConfig
    evaluator: Evaluator | None = None
    policy_of: PolicyOf | None = None
    log: TrajectoryLog | None = None
    tasks: FileTasks = field(default_factory=FileTasks)
    journal: Journal = field(default_factory=Journal)
    teacher: Teacher | None = None

    def of_adapters(self, emit: Emit) -> AdapterTrainingParts:
        """Those that the training of every adapter uses, with the emitter of their events."""
        return AdapterTrainingParts(
            self.learner,
            self.adapters,
            self.checkpoints,
            Gate(self.config.gate.eval_floor),
            self.config,
            self.checkpointing,
            emit,
            self.policy_of,
            self.evaluator,
            self.journal,
            self.teacher,
        )
