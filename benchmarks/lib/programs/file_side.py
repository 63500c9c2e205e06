"""Our side of `studies/files.py`: one run of `mlx_parallm_train` on a file, with the adapter and settings of an order.

    python -m benchmarks.lib.programs.file_side ORDER.json

The order's `data` is the file, its `loss` the kind. All settings that the other side has no counterpart of keep their
defaults.
"""

import json
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib.training.beside_tasks import RESULT, ROWS, Order
from mlx_parallm.app.train import run
from mlx_parallm.app.training_run import TrainOptions
from mlx_parallm.cli.train_file import fixed
from mlx_parallm.config import LoRAConfig, RLConfig, configure
from mlx_parallm.extras.files.data import FileSettings, TrainingData
from mlx_parallm.extras.files.forms import FileKind
from mlx_parallm.extras.files.run import FileRun
from mlx_parallm.rl.status import EvaluationResult, UpdateReport


@dataclass
class Watch:
    """Implements `app.training_run.TrainView`: notes the figures of each update."""

    updates: list[dict[str, Any]] = field(default_factory=list)
    began: tuple[float, float] = (0.0, 0.0)

    def started(self, facts: Mapping[str, str], steps_done: int, folder: Path) -> None:
        self.began = (time.perf_counter(), time.process_time())

    def updated(self, report: UpdateReport) -> None:
        seconds, processor = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        self.updates.append({"seconds": seconds, "processor": processor, "loss": report.metrics["loss"]})

    def evaluated(self, result: EvaluationResult) -> None: ...

    def rollout(self, done: int, wanted: int) -> None: ...

    def task_failed(self, reason: str) -> None: ...

    def sampled(self, best: object, worst: object) -> None: ...


def main(order: Order) -> None:
    setting, kind = order.hyper, FileKind(order.loss)
    size = getattr(setting, ROWS[kind])
    data = TrainingData(FileSettings(kind, order.data, 0.0, size, 1, order.seed))
    algorithm = fixed(kind)["rl_training.algorithm"].value
    config = configure(
        Path(order.model),
        LoRAConfig(rank=setting.rank, alpha=setting.alpha),
        RLConfig(algorithm=algorithm, learning_rate=setting.learning_rate, seed=order.seed),
        server__mode="training_only",
        adapters__init_from=order.adapter,
        rl_training__loss__preference_beta=setting.preference_beta,
        rl_training__optimizer__beta1=setting.beta1,
        rl_training__optimizer__beta2=setting.beta2,
        rl_training__optimizer__eps=setting.eps,
        rl_training__optimizer__weight_decay=setting.weight_decay,
        rl_training__optimizer__max_grad_norm=setting.max_grad_norm,
        checkpointing__checkpoint_dir=Path(order.folder) / "run",
    )
    watch = Watch()
    run(config, TrainOptions(order.data, data.steps, 2, size), watch, partial(FileRun, data=data))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    (Path(order.folder) / RESULT).write_text(json.dumps({"updates": watch.updates, "peak_mb": peak}))


if __name__ == "__main__":
    main(Order.read(Path(sys.argv[1])))
