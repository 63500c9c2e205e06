"""What a run of `mlx_parallm_train` is asked for, and what it shows while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mlx_parallm.app.banner import checkpoints_text
from mlx_parallm.app.build import Served
from mlx_parallm.app.tracking import metrics_file
from mlx_parallm.config import Config
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.status import EvaluationResult, UpdateReport

ENDLESS = 10**9
"""Steps of what trains until it is stopped."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What a run does, besides its configuration.

    Each of `steps` takes `prompts_per_step` groups of `group_size` trajectories from `environment` and makes one update
    from them. In a resumed run, the steps that were made before count too. With Atropos, `environment` is a name for
    people.
    `log` is the JSONL file of their figures; None: metrics.jsonl in the run's folder. `warm_up`: so many examples of
    the environment are imitated before the first step.
    """

    environment: str
    steps: int
    group_size: int
    prompts_per_step: int
    log: Path | None = None
    warm_up: int = 0


@dataclass(frozen=True, slots=True)
class SampleText:
    """One answer of a step: the last message of its prompt, its own text, and its reward."""

    prompt: str
    text: str
    reward: float

    @classmethod
    def of(cls, trajectory: Trajectory, reward: float) -> SampleText:
        messages = trajectory.collection.messages
        prompt = str(messages[-1].get("content", "")) if messages else ""
        return cls(prompt, trajectory.text, reward)


class TrainView(Protocol):
    """Receives the progress of a run, all from one thread. No method raises or blocks."""

    def started(self, facts: Mapping[str, str], steps_done: int, folder: Path) -> None:
        """The model is loaded and nothing is drawn yet.

        Args:
            facts: short names and their texts, in order.
            steps_done: steps that the run made before it was resumed.
            folder: of the run.
        """

    def evaluated(self, result: EvaluationResult) -> None:
        """The version that the run starts from was evaluated. Later evaluations are in the metrics of reports."""

    def rollout(self, done: int, wanted: int) -> None:
        """In the current step, `done` of `wanted` trajectories are drawn."""

    def task_failed(self, reason: str) -> None:
        """A task of the current step could not be answered, or its answers could not be scored."""

    def sampled(self, best: SampleText, worst: SampleText) -> None:
        """The samples of the current step with the highest and with the lowest reward."""

    def updated(self, report: UpdateReport) -> None:
        """A step has ended, with or without a published version.

        Its metrics include seconds (of the whole step) and, if its answers were drawn here, tokens_per_second.
        """


def run_facts(config: Config, options: TrainOptions, served: Served) -> Mapping[str, str]:
    """Short names and texts of what the run trains, on what, and where it writes."""
    training, model = config.rl_training, config.model
    return {
        "model": f"{served.card.name}, {served.card.parameters / 1e6:,.0f}M parameters",
        "environment": options.environment,
        **({"reward": training.reward} if training.reward else {}),
        "adapter": f"{config.adapters.default_adapter}, rank {model.lora_rank}, alpha {model.lora_alpha:g}, "
        f"{', '.join(model.lora_target_modules)}",
        "update": f"{training.algorithm}, {options.prompts_per_step} prompts x {options.group_size} samples, "
        f"learning rate {training.optimizer.learning_rate:g}",
        **_inference_facts(config),
        **_evaluation_facts(config, len(served.training.parts.held_out) if served.training else 0),
        "checkpoints": checkpoints_text(served.run),
        **({"log": str(metrics_file(served.run, options.log))} if served.run else {}),
    }


def _inference_facts(config: Config) -> Mapping[str, str]:
    settings = config.inference
    return {"samples": f"from {settings.engine} at {settings.url}"} if settings.engine.outside else {}


def _evaluation_facts(config: Config, tasks: int) -> Mapping[str, str]:
    evaluation = config.rl_training.evaluation
    if evaluation.every is None:
        return {}
    return {"evaluation": f"{tasks} held-out tasks x {evaluation.samples}, every {evaluation.every} updates"}
