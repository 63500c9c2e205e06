"""`mlx_parallm adapters average`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.cli.flags import add_chosen_flags, settings
from mlx_parallm.cli.table import table
from mlx_parallm.config import KEYS, Mode, Setting, resolve
from mlx_parallm.errors import ConfigError

if TYPE_CHECKING:
    from mlx_parallm.adapters.average import Average
    from mlx_parallm.app.compare import Comparison
    from mlx_parallm.core import EvaluationResult

_TASKS = "rl_training.evaluation.tasks"
_EVALUATION = (
    *("rl_training.reward", "rl_training.judge.url", "rl_training.judge.model", "rl_training.max_completion_tokens"),
    *("rl_training.system_prompt", _TASKS, "rl_training.evaluation.size"),
)
_FIXED = {
    "server.mode": Setting(Mode.INFERENCE_ONLY.value, "adapters average"),
    "rl_training.enabled": Setting(False, "adapters average"),
    "rl_training.evaluation.every": Setting(1, "adapters average"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add("adapters", type=Path, nargs="+", metavar="ADAPTER_DIR", help="The adapters' folders, two or more.")
    add("--out", type=Path, required=True, metavar="DIR", help="Required. The folder to write. It must not exist.")
    weights = "One number above 0 for each adapter, such as its number of examples. Default: all weigh the same."
    add("--weights", type=float, nargs="+", metavar="NUMBER", help=weights)
    rank = "Largest rank of the average. Default: the sum of the adapters' ranks, at which the average is exact."
    add("--rank", type=int, metavar="RANK", help=rank)
    add("--format", choices=("mlx-lm", "peft"), default="peft", help="Default: %(default)s.")
    add("--model-path", metavar="DIR_OR_HUB_ID", help="The base model. Default: the bundled one.")
    group = parser.add_argument_group("evaluation", "With --eval-tasks, the adapters and the average are evaluated.")
    add_chosen_flags(group, _EVALUATION)
    parser.set_defaults(run=average_adapters)


def average_adapters(args: argparse.Namespace) -> int:
    """Writes the weighted mean of adapters, and prints what the rank costs and what the evaluation found.

    Raises:
        ConfigError: an argument or a setting cannot be used.
        ParaLLMError: see `model.average.write_average` and `app.compare.Comparison`.
    """
    from mlx_parallm.model.average import write_average

    comparison = _comparison(args)
    evaluations: list[EvaluationResult] = []

    def evaluate(folder: Path, rank: int) -> None:
        if comparison is not None:
            evaluations.extend(comparison.evaluate([*args.adapters, folder], rank))

    mean = write_average(args.model_path, args.adapters, args.out, args.format, args.weights, args.rank, evaluate)
    print(_report(args.out, len(args.adapters), mean))
    if evaluations:
        print(_rewards(args.adapters, evaluations))
    return 0


def _comparison(args: argparse.Namespace) -> Comparison | None:
    """None without --eval-tasks."""
    given = settings(args)
    if _TASKS not in given:
        if useless := [given[path].source for path in _EVALUATION if path in given]:
            raise ConfigError(f"{useless[0]}: there is no evaluation; add --eval-tasks, or leave it out")
        return None
    from mlx_parallm.app.compare import Comparison

    model = {"model.base_model_path": Setting(args.model_path, "--model-path")}
    return Comparison(resolve(given | _FIXED | model, _environment()).config)


def _environment() -> dict[str, str]:
    """The environment variables of the evaluation's settings. Those of a server, such as its folders, do not count."""
    names = {KEYS[path].env_name for path in (*_EVALUATION, "rl_training.judge.api_key") if path != _TASKS}
    return {name: value for name, value in os.environ.items() if name in names}


def _report(output: Path, count: int, mean: Average) -> str:
    rank = mean.weights.rank
    wrote = f"wrote {output}: the mean of {count} adapters, rank {rank}"
    if rank == mean.full_rank:
        return f"{wrote}, which is exact"
    worst = mean.reductions[mean.worst]
    return (
        f"{wrote} of {mean.full_rank}\n"
        f"lost by the lower rank: {mean.error:.3g} of the Frobenius norm, {worst.error:.3g} in {mean.worst}, the worst"
    )


def _rewards(adapters: Sequence[Path], evaluations: Sequence[EvaluationResult]) -> str:
    names = [*map(str, adapters), "the average"]
    rows = [
        (name, f"{one.mean:.3f}", f"{one.low:.3f} to {one.high:.3f}", str(one.answers), str(one.failed))
        for name, one in zip(names, evaluations, strict=True)
    ]
    return table([("adapter", "mean reward", "95 % interval", "answers", "failed tasks"), *rows])
