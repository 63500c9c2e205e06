"""Runs of `mlx_parallm_train` on a tiny model: their configuration, and a view that remembers what it was shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tiny import save_tiny

from mlx_parallm.app.training_run import SampleText
from mlx_parallm.config import Config, LoRAConfig, RLConfig, configure
from mlx_parallm.rl.status import EvaluationResult, UpdateReport

STEPS, PROMPTS, GROUP = 3, 2, 4


@dataclass
class View:
    facts: dict[str, str] = field(default_factory=dict)
    rollouts: list[tuple[int, int]] = field(default_factory=list)
    reports: list[UpdateReport] = field(default_factory=list)

    first: EvaluationResult | None = None
    samples: list[tuple[SampleText, SampleText]] = field(default_factory=list)
    made: int = 0
    failures: list[str] = field(default_factory=list)
    then: Callable[[View], None] = lambda view: None

    def started(self, facts: Mapping[str, str], made: int, folder: Path) -> None:
        self.facts, self.made = dict(facts), made

    def evaluated(self, result: EvaluationResult) -> None:
        self.first = result

    def sampled(self, best: SampleText, worst: SampleText) -> None:
        self.samples.append((best, worst))

    def task_failed(self, reason: str) -> None:
        self.failures.append(reason)

    def rollout(self, done: int, wanted: int) -> None:
        self.rollouts.append((done, wanted))

    def updated(self, report: UpdateReport) -> None:
        self.reports.append(report)
        self.then(self)


def config(tmp_path: Path, algorithm: str = "dapo", **keys: object) -> Config:
    """Nothing is drawn ahead, so that what a run draws does not depend on how long its rewards take."""
    if not (tmp_path / "model").exists():
        save_tiny("llama", tmp_path / "model")
    rl = RLConfig(algorithm=algorithm, learning_rate=1e-3, batch_size=PROMPTS * GROUP)
    return configure(
        tmp_path / "model",
        LoRAConfig(rank=4, alpha=8.0),
        rl,
        server__kv_cache_memory="16MB",
        server__mode="training_only",
        rl_training__max_completion_tokens=6,
        **{"rl_training__draw_ahead_after_s": None, **keys},
    )
