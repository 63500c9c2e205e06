"""The commands for adapter files, which need no server: adapters merge, convert and average."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.cli.flags import add_chosen_flags, settings
from mlx_parallm.cli.parser import AddCommand
from mlx_parallm.cli.table import table
from mlx_parallm.config import KEYS, Mode, Setting, resolve
from mlx_parallm.errors import ConfigError

if TYPE_CHECKING:
    from mlx_parallm.adapters.average import Average
    from mlx_parallm.cli.adapter_evaluation import ComparisonSettings
    from mlx_parallm.rl.status import EvaluationResult


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


def _add_average(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `adapters average`."""
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
        ParaLLMError: see `model.merge.write_average` and `cli.adapter_evaluation.Comparison`.
    """
    from mlx_parallm.model.merge import write_average

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


def _comparison(args: argparse.Namespace) -> ComparisonSettings | None:
    """None without --eval-tasks."""
    given = settings(args)
    if _TASKS not in given:
        if useless := [given[path].source for path in _EVALUATION if path in given]:
            raise ConfigError(f"{useless[0]}: there is no evaluation; add --eval-tasks, or leave it out")
        return None
    from mlx_parallm.cli.adapter_evaluation import ComparisonSettings

    model = {"model.base_model_path": Setting(args.model_path, "--model-path")}
    return ComparisonSettings(resolve(given | _FIXED | model, _environment()).config)


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


_ADAPTER = "The adapter's folder, in either format; or a run, an adapter in it, and there `latest` or a tag."


def add_commands(add: AddCommand) -> None:
    """Adds the commands."""
    merging = add("merge", "Write a model with an adapter merged into its weights. Needs no server.")
    _add_folder_arguments(merging)
    merging.add_argument("--dequantize", action="store_true", help="Write a dense model instead of a quantized one.")
    merging.set_defaults(run=merge_adapter)

    converting = add("convert", "Write an adapter in another program's format. Needs no server.")
    _add_folder_arguments(converting)
    converting.add_argument("--format", choices=("mlx-lm", "peft"), default="peft", help="Default: %(default)s.")
    converting.set_defaults(run=convert_adapter)

    _add_average(add("average", "Write the weighted mean of adapters, and evaluate it. Needs no server."))


def _add_folder_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", type=Path, metavar="ADAPTER_DIR", help=_ADAPTER)
    parser.add_argument("output", type=Path, metavar="OUTPUT_DIR", help="The folder to write. It must not exist.")
    parser.add_argument("--model-path", metavar="DIR_OR_HUB_ID", help="The base model. Default: the bundled one.")


def merge_adapter(args: argparse.Namespace) -> int:
    """Writes a model directory with the adapter merged into the weights."""
    from mlx_parallm.model.merge import merge

    merge(args.model_path, args.adapter, args.output, dequantize=args.dequantize)
    print(f"wrote {args.output}; serve it with `mlx_parallm serve --model-path {shlex.quote(str(args.output))}`")
    return 0


def convert_adapter(args: argparse.Namespace) -> int:
    """Writes an adapter in another program's format."""
    from mlx_parallm.model.merge import convert

    convert(args.model_path, args.adapter, args.output, args.format)
    print(f"wrote {args.output} in the format of {args.format}")
    return 0
