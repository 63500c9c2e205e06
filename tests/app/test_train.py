"""`mlx_parallm_train` on a tiny model, from an environment's first task to the last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rl.user_package import install
from tiny import save_tiny

from mlx_parallm.app.train import FINAL, run
from mlx_parallm.cli.train_view import TrainOptions
from mlx_parallm.config import Config, LoRAConfig, RLConfig, configure
from mlx_parallm.core import UpdateReport
from mlx_parallm.errors import ConfigError

STEPS, PROMPTS, GROUP = 3, 2, 4
SCORED = """
from mlx_parallm.core import Collection
from mlx_parallm.rl.environments import Task

class letters:
    def tasks(self, seed):
        number = 0
        while True:
            number += 1
            message = {"role": "user", "content": f"{seed} {number}"}
            yield Task((message,), Collection(SCORER, {"pattern": PATTERN}))
"""


@dataclass
class View:
    facts: dict[str, str] = field(default_factory=dict)
    rollouts: list[tuple[int, int]] = field(default_factory=list)
    reports: list[UpdateReport] = field(default_factory=list)

    def started(self, facts: Mapping[str, str]) -> None:
        self.facts = dict(facts)

    def rollout(self, done: int, wanted: int) -> None:
        self.rollouts.append((done, wanted))

    def updated(self, report: UpdateReport) -> None:
        self.reports.append(report)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a package with environments, whose scorer is `SCORER`."""

    def make(scorer: str, pattern: str = "[ -O]") -> None:
        site = tmp_path / f"site_{len(sys.path)}"
        site.mkdir()
        source = SCORED.replace("SCORER", repr(scorer)).replace("PATTERN", repr(pattern))
        install(site, "user_letters", source, "mlx_parallm.environments", "letters")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, "user_letters", raising=False)

    return make


def config(tmp_path: Path, algorithm: str = "dapo", **keys: object) -> Config:
    save_tiny("llama", tmp_path / "model")
    rl = RLConfig(algorithm=algorithm, learning_rate=1e-3, batch_size=PROMPTS * GROUP)
    return configure(
        tmp_path / "model",
        LoRAConfig(rank=4, alpha=8.0),
        rl,
        server__kv_cache_memory="16MB",
        server__mode="training_only",
        rl_training__max_completion_tokens=6,
        **keys,
    )


OPTIONS = TrainOptions("letters", STEPS, GROUP, PROMPTS)


@pytest.mark.timeout(120)
def test_steps_draw_score_update_and_save_the_last(tmp_path: Path, user) -> None:
    user("regex")
    view = View()
    kept = tmp_path / "checkpoints"
    assert run(config(tmp_path, "grpo", checkpointing__checkpoint_dir=kept), OPTIONS, view) == 0
    assert [report.step for report in view.reports] == [1, 2, 3]
    assert {report.status for report in view.reports} == {"published"}
    assert [report.checkpoint is not None for report in view.reports] == [False, False, True]
    for report in view.reports:
        assert report.metrics["tokens"] > 0
        assert report.metrics["tokens_per_second"] > 0
        assert 0 <= report.metrics["reward_mean"] <= 1
        assert report.metrics["staleness"] == 0
    assert [done for done, _ in view.rollouts] == [0, GROUP, 2 * GROUP] * STEPS
    assert (kept / "default" / view.reports[-1].checkpoint / "optimizer.safetensors").exists()
    assert FINAL in (kept / "default" / "tags.json").read_text()
    assert view.facts["environment"] == "letters"
    assert view.facts["adapter"].startswith("default, rank 4, alpha 8")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("algorithm", "draws"), [("dapo", 4), ("grpo", 1)])
def test_dapo_draws_again_for_groups_without_a_signal_and_a_step_without_any_ends(
    tmp_path: Path, user, algorithm: str, draws: int
) -> None:
    user("regex", pattern="")  # every answer gets 1
    view = View()
    assert run(config(tmp_path, algorithm), TrainOptions("letters", 1, GROUP, PROMPTS), view) == 0
    (report,) = view.reports
    assert (report.status, report.reason) == ("skipped", "no_signal")
    assert report.metrics["reward_mean"] == 1.0
    assert view.rollouts[-1] == (draws * PROMPTS * GROUP, draws * PROMPTS * GROUP)


@pytest.mark.timeout(120)
def test_tasks_that_cannot_be_scored_end_the_run_before_anything_is_drawn(tmp_path: Path, user) -> None:
    user("no_such_scorer")
    view = View()
    with pytest.raises(ConfigError, match="no_such_scorer"):
        run(config(tmp_path), OPTIONS, view)
    assert view.facts == {}


def test_an_unknown_environment_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    absent = configure(tmp_path / "no model", None, None)
    with pytest.raises(ConfigError, match="letterz"):
        run(absent, TrainOptions("letterz", 1, 2, 1), View())
