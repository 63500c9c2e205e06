"""`mlx_parallm reward-model`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.cli.flags import flags_of_keys, settings
from mlx_parallm.cli.parser import argument, group, takes
from mlx_parallm.config import KEYS, resolve
from mlx_parallm.errors import ConfigError

if TYPE_CHECKING:
    from mlx_parallm.extras.reward_models.learning import FitResult
    from mlx_parallm.extras.reward_models.work import StepLoss

_SETTINGS = (
    *("adapters.adapter_dir", "model.base_model_path", "model.trust_remote_code", "rl_training.seed"),
    *("model.lora_rank", "model.lora_alpha", "model.lora_target_modules", "rl_training.micro_batch_tokens"),
)
_LINES = 10
"""Lines that say how far the training is."""


def _held_out(text: str) -> float | str:
    try:
        share = float(text)
    except ValueError:
        return text
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"must be a file, or a share from 0 to below 1, got {text!r}")
    return share


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Parses a number above 0 with `kind`, which is int or float."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
        return value

    return parse


@takes(
    argument("name", metavar="NAME", help="The reward model's name, and that of its folder in --adapter-dir."),
    argument(
        "--preferences",
        required=True,
        metavar="FILE",
        help="Required. JSONL or parquet file, or hub data set, whose rows have prompt (or messages), chosen and "
        "rejected.",
    ),
    argument(
        "--held-out",
        type=_held_out,
        default=0.1,
        metavar="FILE_OR_SHARE",
        help="Preferences to test it on: another file, or the share of the prompts that is held out, 0 for none. "
        "Default: 0.1.",
    ),
    argument("--epochs", type=_positive(int), default=2, metavar="N", help="Default: %(default)s."),
    argument(
        "--batch-size", type=_positive(int), default=16, metavar="N", help="Preferences of one step. Default: 16."
    ),
    argument(
        "--learning-rate",
        type=_positive(float),
        default=5e-4,
        metavar="NUMBER",
        help="Peak learning rate; it rises first and falls to 0. Default: %(default)s.",
    ),
    group("settings", flags_of_keys(*_SETTINGS)),
)
def train(args: argparse.Namespace) -> int:
    """Trains a reward model, and prints how often it agrees with held-out preferences.

    Raises:
        ConfigError: an argument or a setting is missing, or cannot be used.
        ParaLLMError: see `extras.reward_models.command.train_reward_model`.
    """
    names = {KEYS[path].env_name for path in _SETTINGS}
    config = resolve(settings(args), {name: value for name, value in os.environ.items() if name in names}).config
    if config.adapters.adapter_dir is None:
        raise ConfigError("--adapter-dir: name the folder of the reward model; the server finds it there")
    from mlx_parallm.extras.reward_models.command import PreferenceSources, train_reward_model
    from mlx_parallm.extras.reward_models.learning import FitSettings

    fit = FitSettings(args.epochs, args.batch_size, args.learning_rate, config.rl_training.seed)
    sources = PreferenceSources(args.preferences, args.held_out)
    folder, result = train_reward_model(config, args.name, sources, fit, _print_step)
    print(_report(args.name, folder, result))
    return 0


def _print_step(step: int, steps: int, loss: StepLoss) -> None:
    if step % math.ceil(steps / _LINES) == 0 or step == steps:
        print(f"step {step} of {steps}   loss {loss.loss:.3f}   agreement {loss.agreement:.2f}", flush=True)


def _report(name: str, folder: Path, result: FitResult) -> str:
    lines = [f"wrote {folder}: {result.trained} preferences, {result.steps} steps"]
    if (agreement := result.held_out) is not None:
        low, high = agreement.interval
        lines.append(
            f"agreement with {agreement.preferences} held-out preferences: {agreement.share:.3f} "
            f"(95 % interval {low:.3f} to {high:.3f}; 0.5 is chance)"
        )
    lines.append(f"name it as the scorer reward_model:{name}")
    return "\n".join(lines)
