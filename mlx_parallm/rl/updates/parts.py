"""What training is made of, as the application builds it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_parallm.adapters.service import AdapterService
from mlx_parallm.config import CheckpointingConfig, ResolvedTraining
from mlx_parallm.rl.environments.files import FileTasks
from mlx_parallm.rl.environments.protocol import Task
from mlx_parallm.rl.environments.thread import EnvironmentThread
from mlx_parallm.rl.evaluation import Evaluator
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.scoring.service import ScoringService
from mlx_parallm.rl.teachers import Teacher
from mlx_parallm.rl.trajectory_log import TrajectoryLog
from mlx_parallm.rl.updates.checkpoints import PolicyCheckpoints, PolicyOf
from mlx_parallm.train.learner import Learner


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """What training is made of.

    `evaluator`: asks versions the held-out tasks. `policy_of`: gives the policy that training starts from
    if the live version has no checkpoint of a trainer. `log`: gets every trajectory in the end. `tasks`: have the
    answers that requests leave out. `journal`: of the run; it is closed with the service. `teacher`: what distillation
    imitates. `environment_thread`: where all rollouts of environments run. `held_out`: the tasks of evaluations, which
    are not to be trained on.
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
    environment_thread: EnvironmentThread = field(default_factory=EnvironmentThread)
    held_out: tuple[Task, ...] = ()
