"""mlx_parallm_train as its operator meets it, with a stand-in for the training itself."""

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlx_parallm.cli.main import main, train
from mlx_parallm.config import Mode
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import ModelNotFoundError
from mlx_parallm.rl.status import EvaluationResult, UpdateReport
from mlx_parallm.rl.tracking import JsonlTracker, Record

pytestmark = pytest.mark.ci

TASK = "reasoning_gym:leg_counting"
RUN = ["--environment", TASK, "--steps", "2"]
PNG = b"\x89PNG\r\n\x1a\n"


def published(version: int, **metrics: float) -> UpdateReport:
    values = {"reward_mean": 0.25 * version, "reward_std": 0.5, "loss": -0.01, **metrics}
    return UpdateReport(AdapterRef("default", version), version, "published", metrics=values)


@dataclass
class Training:
    """What a run was asked for, and what it tells its view and its file; `error` is raised after that. It begins after
    the step `made`."""

    reports: list[UpdateReport] = field(default_factory=lambda: [published(1), published(2)])
    error: BaseException | None = None
    asked: list[object] = field(default_factory=list)
    made: int = 0
    failures: tuple[str, ...] = ()
    status: int = 0
    evaluation: EvaluationResult | None = None
    folder: Path = Path("kept")
    make: object = None

    def run(self, config, options, view, make=None):
        self.asked.append((config, options))
        self.make = make
        if not self.reports and self.error:
            raise self.error
        self.folder.mkdir(exist_ok=True)
        tracker = JsonlTracker(options.log or self.folder / "metrics.jsonl")
        view.started({"model": "m"}, self.made, self.folder)
        if self.evaluation:
            view.evaluated(self.evaluation)
            tracker.write(Record("evaluation", self.made, self.evaluation.metrics, {"adapter": "base", "version": 0}))
        for failure in self.failures:
            view.task_failed(failure)
        for step, report in enumerate(self.reports, self.made + 1):
            view.rollout(1, 32)
            view.updated(report)
            fields = {"adapter": "default", "version": report.step, "status": report.status, "checkpoint": None}
            tracker.write(Record("update", step, report.metrics, fields))
        self.made += len(self.reports)
        saved = self.folder / "default"
        saved.mkdir(exist_ok=True)
        (saved / "latest").write_text(f"checkpoint-{self.made}\n")
        if self.error:
            raise self.error
        return self.status


@pytest.fixture
def training(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    stand_in = Training()
    monkeypatch.setattr("mlx_parallm.app.train.run", stand_in.run)
    return stand_in


# ---- what it asks for --------------------------------------------------------------------------


def test_arguments_reach_the_run(training):
    argv = [*RUN, "--group-size", "4", "--prompts-per-step", "6", "--max-tokens", "64", "--seed", "5", "--log", "log"]
    argv += ["--temperature", "0.8", "--system-prompt", "@prompt.txt", "--eval-every", "5", "--eval-size", "20"]
    assert train([*argv, "--learning-rate", "1e-3"]) == main(["train", *argv, "--learning-rate", "1e-3"]) == 0
    (config, options), again = training.asked
    assert again == (config, options)
    assert (options.environment, options.steps, options.group_size, options.prompts_per_step) == (TASK, 2, 4, 6)
    assert (config.server.mode, config.rl_training.enabled) == (Mode.TRAINING_ONLY, True)
    assert (config.rl_training.max_completion_tokens, config.rl_training.seed) == (64, 5)
    assert config.rl_training.optimizer.learning_rate == 1e-3
    assert (config.rl_training.rollout_temperature, config.rl_training.system_prompt) == (0.8, "@prompt.txt")
    assert (config.rl_training.evaluation.every, config.rl_training.evaluation.size) == (5, 20)
    assert options.log == Path("log")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "2"], "error: --environment: name what to train on, such as FILE.jsonl or reasoning_gym:"),
        (["--environment", TASK], "error: --steps: say how many updates to make"),
        ([*RUN, "--steps", "0"], "error: argument --steps: must be a whole number, 1 at least, got '0'"),
        ([*RUN, "--group-size", "1"], "error: argument --group-size: must be a whole number, 2 at least"),
        ([*RUN, "--prompts-per-step", "x"], "error: argument --prompts-per-step: must be a whole number"),
        ([*RUN, "--group-size", "1000"], "error: rl_training: trajectory_buffer_size 1000 is below update_frequency"),
        (
            [*RUN, "--lora-rank", "32", "--max-lora-rank", "16"],
            "error: model.lora_rank: 32 is above adapters.max_lora_rank 16",
        ),
        ([*RUN, "--log", "none/x.jsonl"], "error: --log: none/x.jsonl cannot be written: No such file or directory"),
        ([*RUN, "--plot", "none/x.png"], "error: --plot: none/x.png cannot be written: name a file in a folder"),
        ([*RUN, "--plot", "."], "error: --plot: . cannot be written"),
        ([*RUN, "--port", "1"], "error: --port: only mlx_parallm_serve has this flag; leave it out"),
        (["--sft", "a.jsonl", "--kto", "b.jsonl"], "error: --kto: give one of --sft, --dpo and --kto"),
        ([*RUN, "--dpo", "a.jsonl"], "error: --dpo: a run learns from a file or from rollouts"),
        (["--sft", "a.jsonl", "--steps", "2", "--epochs", "2"], "error: --epochs: --steps says already"),
        (["--sft", "a.jsonl", "--eval-every", "2"], "error: rl_training: evaluation.every: no tasks are held out"),
        ([*RUN, "--held-out", "0"], "error: --held-out: only a run that learns from a file"),
        ([*RUN, "--max-length", "9"], "error: --max-length: only a run that learns from a file"),
        (["--sft", "a.jsonl", "--held-out", "0.9"], "error: argument --held-out: must be a share of the rows"),
        (["--sft", "none.jsonl"], "error: --sft: none.jsonl cannot be read: No such file"),
        ([*RUN, "--init-from", "none"], "error: --init-from: none: there is no adapter_config.json"),
        (["--sft", "a.jsonl", "--warm-up", "3"], "error: --warm-up: only a run that learns from rollouts heeds it"),
        (["--sft", "a.jsonl", "--reward", "r.py:f"], "error: --sft: a run learns from a file or from rollouts"),
        ([*RUN, "--patience", "3"], "error: --patience: only a run that learns from a file, with --sft, --dpo"),
        ([*RUN, "--epochs", "2"], "error: --epochs: only a run that learns from a file"),
        ([*RUN, "--mode", "sft"], "error: argument --mode: invalid choice: 'sft'"),
    ],
)
def test_wrong_arguments_exit_2_before_anything_is_loaded(training, capsys, argv, message):
    assert train(argv) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(message)
    assert errors.count("\n") == 1
    assert training.asked == []


def test_a_file_of_rows_says_how_many_steps_a_run_has(training, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 30)
    for kind, flags in (("sft", ["--epochs", "2", "--batch-size", "7"]), ("sft", ["--steps", "10"])):
        assert train([f"--{kind}", "rows.jsonl", *flags, "--held-out", "0"]) == 0
        config, options = training.asked[-1]
        assert (options.environment, options.steps) == ("rows.jsonl", 10)
        assert config.rl_training.algorithm == "cross_entropy"
        assert config.rl_training.optimizer.learning_rate == 1e-4
        assert training.make is not None
        assert "go on with rewards: `mlx_parallm_train --init-from kept/default/checkpoint-" in capsys.readouterr().out
    assert train(["--sft", "rows.jsonl", "--learning-rate", "3e-4"]) == 0
    assert training.asked[-1][0].rl_training.optimizer.learning_rate == 3e-4


def test_a_run_takes_over_the_rank_of_the_adapter_that_it_begins_with(training, tmp_path):
    made = {
        "fine_tune_type": "lora",
        "lora_parameters": {"rank": 32, "scale": 0.5, "keys": ["self_attn.q_proj", "mlp.up_proj"]},
    }
    (tmp_path / "tone").mkdir()
    (tmp_path / "tone" / "adapter_config.json").write_text(json.dumps(made))
    assert train([*RUN, "--init-from", "tone"]) == 0
    model, adapters = training.asked[-1][0].model, training.asked[-1][0].adapters
    assert (model.lora_rank, model.lora_alpha, model.lora_target_modules) == (32, 16, ("q_proj", "up_proj"))
    assert adapters.max_lora_rank == 32
    assert adapters.init_from == Path("tone")


def test_without_matplotlib_the_run_says_so_first_and_draws_nothing(training, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert train(RUN) == 0
    printed = capsys.readouterr()
    assert "WARNING: no curves will be drawn: matplotlib is not installed" in printed.err
    assert "pip install 'mlx-parallm[plots]'" in printed.err
    assert "curves in" not in printed.out
    assert not list(tmp_path.rglob("*.png"))


def test_print_config_needs_no_run(training, capsys):
    assert train(["--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "  mode: training_only  # from mlx_parallm_train" in printed
    assert "  update_frequency: 32  # from --group-size and --prompts-per-step" in printed
    assert training.asked == []


# ---- what it leaves ----------------------------------------------------------------------------


def test_record_of_a_run(training, tmp_path, capsys):
    assert train(RUN) == 0
    assert (tmp_path / "kept" / "training.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-6:] == [
        "2 published; mean reward 0.250 in the first, 0.500 in the last; newest version default@2",
        "checkpoints in kept",
        "updates in kept/metrics.jsonl",
        "curves in kept/training.png",
        "serve it with `mlx_parallm serve --checkpoint-dir kept --serve-adapter default`",
        "take it elsewhere with `mlx_parallm adapters export kept/default/checkpoint-2 --to fused --out default-fused`",
    ]
    assert shown.err == ""


def test_the_end_of_a_resumed_run_is_of_the_whole_run(training, tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr("mlx_parallm.cli.train.draw_curves", lambda made, path, title: drawn.append(made))
    argv = ["--environment", TASK, "--steps", "15", "--checkpoint-dir", "kept"]
    training.status = 130
    assert train(argv) == 130
    assert "stopped after 2 of 15 steps; the same command continues\n" in capsys.readouterr().out
    training.reports, training.status = [published(3)], 0
    assert train([*argv, "--lora-rank", "32", "--model-path", "a model", "--default-adapter", "tone"]) == 0
    shown = capsys.readouterr().out
    assert "3 published; mean reward 0.250 in the first, 0.750 in the last; newest version default@3" in shown
    assert [[made.step for made in each] for each in drawn] == [[1, 2], [1, 2, 3]]
    assert "is live" not in shown


def test_a_resumed_run_counts_on_and_tells_of_tasks_that_failed(training, capsys):
    training.made, training.failures = 5, ("task 7: too long",)
    assert train(["--environment", TASK, "--steps", "9"]) == 0
    shown = capsys.readouterr().out
    assert "5 of 9 steps were made before; 4 are left" in shown
    assert "FAILED task 7: too long" in shown
    assert "6/9" in shown


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (ModelNotFoundError("no model"), 1)])
def test_run_that_ends_early_leaves_its_record(training, tmp_path, capsys, error, status):
    training.reports, training.error = [published(1)], error
    assert train(RUN) == status
    assert (tmp_path / "kept" / "training.png").read_bytes().startswith(PNG)
    assert "1 published" in capsys.readouterr().out


def test_an_evaluation_has_its_column_and_its_place_in_the_last_lines(training, capsys):
    training.evaluation = EvaluationResult(AdapterRef("base", 0), 0, 0.125, 0.05, 0.3, 64, 0, 5.0)
    training.reports[1] = published(2, eval_mean=0.5, eval_low=0.4, eval_high=0.6)
    assert train([*RUN, "--eval-every", "2"]) == 0
    shown = capsys.readouterr().out
    assert "evaluation of base@0 before the first step: 0.125 [0.05, 0.30], 64 answers" in shown
    assert re.search(r"step +reward +evaluation +loss +grad", shown)
    assert re.search(r"2/2 +0.500 ± 0.500 +0.500 \[0.40, 0.60\] ", shown)
    assert "; evaluation 0.125 [0.05, 0.30] then 0.500 [0.40, 0.60]; newest version default@2" in shown
