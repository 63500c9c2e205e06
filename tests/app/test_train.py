"""`mlx_parallm_train` on a tiny model, from an environment's first task to the last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rl.user_package import install
from safetensors.numpy import load_file
from training_runs import GROUP, PROMPTS, STEPS, View, config

import mlx_parallm
from mlx_parallm.app.train import run
from mlx_parallm.app.training_run import FINAL, TrainOptions
from mlx_parallm.config import configure
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.engine.figures import EngineStats
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.errors import ConfigError, EngineDeadError, StorageError, TrainingFailedError
from mlx_parallm.machine import processors
from mlx_parallm.rl.runs.record import RunState, read_record, summarize
from mlx_parallm.rl.runs.store import JournalFile

pytestmark = pytest.mark.ci

SCORED = """
from mlx_parallm.core.requests import (CollectionSpec)
from mlx_parallm.rl.environments import Task

class letters:
    def tasks(self, seed):
        number = 0
        while True:
            number += 1
            long = number in LONG
            message = {"role": "user", "content": "word " * 9000 if long else f"{seed} {number}"}
            yield Task((message,), CollectionSpec(SCORER, {"pattern": PATTERN}))
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a package with environments, whose scorer is `SCORER`."""

    def make(scorer: str, pattern: str = "[ -O]", long: Sequence[int] = ()) -> None:
        site = tmp_path / f"site_{len(sys.path)}"
        site.mkdir()
        source = SCORED.replace("SCORER", repr(scorer)).replace("PATTERN", repr(pattern))
        source = source.replace("LONG", repr(tuple(long)))
        install(site, "user_letters", source, "mlx_parallm.environments", "letters")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, "user_letters", raising=False)

    return make


OPTIONS = TrainOptions("letters", STEPS, GROUP, PROMPTS)


def test_with_atropos_the_environment_is_a_name_for_people(tmp_path, monkeypatch):
    """The environments of Atropos run by themselves, so none of this name has to be known here."""

    class LoadsError(Exception):
        pass

    def load(*_):
        raise LoadsError

    monkeypatch.setattr("mlx_parallm.app.train.RunningEngine", load)
    keys = {"rl_training__environment": "gsm8k", "rl_training__atropos_url": "http://127.0.0.1:9"}
    with pytest.raises(LoadsError):
        run(config(tmp_path, **keys), replace(OPTIONS, environment="gsm8k"), View())


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
    assert len(view.samples) == STEPS
    for best, worst in view.samples:
        assert 0 <= worst.reward <= best.reward <= 1
        assert best.prompt.startswith("0 ")
    assert view.facts["environment"] == "letters"
    assert view.facts["log"] == str(kept / "metrics.jsonl")
    lines = [json.loads(line) for line in (kept / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["optimizer_step"], line["version"]) for line in lines] == [(n, n, n) for n in (1, 2, 3)]
    assert [line["reward_mean"] for line in lines] == [report.metrics["reward_mean"] for report in view.reports]
    assert (lines[0]["kind"], lines[0]["status"], lines[0]["failures"]) == ("update", "published", [])
    assert lines[2]["checkpoint"] == view.reports[2].checkpoint
    assert view.facts["adapter"].startswith("default, rank 4, alpha 8")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dies", [False, True])
def test_a_run_waits_for_a_cool_machine_unless_its_engine_dies(
    tmp_path: Path, user, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    user("regex")
    view, readings, stats = View(), [], ContinuousBatchProcessor.stats

    def hot_at_first(processor: ContinuousBatchProcessor) -> EngineStats:
        found = stats(processor)
        if view.facts and len(readings) < 3:
            readings.append(found.machine)
            machine = replace(found.machine, training_waits_for="the machine is too hot")
            return replace(found, machine=machine, alive=not dies)
        return found

    monkeypatch.setattr(ContinuousBatchProcessor, "stats", hot_at_first)
    if dies:
        with pytest.raises(EngineDeadError):
            run(config(tmp_path, "grpo"), OPTIONS, view)
        assert not view.reports
    else:
        assert run(config(tmp_path, "grpo"), OPTIONS, view) == 0
        assert len(view.reports) == STEPS
    assert readings


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("decay", "warned"), [(STEPS - 1, False), (STEPS - 2, True)])
def test_a_run_of_more_steps_than_its_schedule_warns_at_the_start(
    tmp_path: Path, user, caplog: pytest.LogCaptureFixture, decay: int, warned: bool
) -> None:
    user("regex")
    keys = {"schedule": "linear", "decay_updates": decay, "warmup_updates": 1}
    settings = config(tmp_path, "grpo", **{f"rl_training__optimizer__{name}": value for name, value in keys.items()})
    seen: list[str] = []
    view = View(then=lambda view: seen.append(caplog.text))
    assert run(settings, OPTIONS, view) == 0
    assert (f"linear learning rate is 0 after {1 + decay} updates" in seen[0]) is warned


@pytest.mark.timeout(120)
def test_a_run_that_learns_nothing_keeps_what_it_began_with(tmp_path: Path, user) -> None:
    """So it can be served all the same."""
    user("regex")
    kept, then = tmp_path / "kept", tmp_path / "then"
    run(config(tmp_path, "grpo", checkpointing__checkpoint_dir=kept), OPTIONS, View())
    user("regex", pattern="never")
    begins = {"checkpointing__checkpoint_dir": then, "adapters__init_from": kept}
    view = View()
    assert run(config(tmp_path, "grpo", **begins), replace(OPTIONS, steps=1), view) == 0
    assert view.reports[-1].status != "published"
    first, second = (
        each / "default" / (each / "default" / "latest").read_text().strip() / "adapters.safetensors"
        for each in (kept, then)
    )
    weights, same = load_file(first), load_file(second)
    assert weights.keys() == same.keys()
    assert all(np.array_equal(weights[name], same[name]) for name in weights)


def weights_in(folder: Path) -> dict[str, np.ndarray]:
    """Of the newest checkpoint."""
    newest = (folder / "default" / "latest").read_text().strip()
    return load_file(folder / "default" / newest / "adapters.safetensors")


def drawn(log: Path) -> dict[str, object]:
    """What each task gave, by its number and the sample's."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    by_id = {record["trajectory_id"]: record for record in records}
    assert len(by_id) == len(records), "no id is used twice"
    assert len({name.split("-")[2] for name in by_id}) == 1, "all have the run's own id"
    return {
        name.split("-", 3)[3]: (record["prompt_token_ids"], record["completion_token_ids"])
        for name, record in by_id.items()
    }


@pytest.mark.timeout(120)
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path, user) -> None:
    """Its tasks, seeds and ids go on, and so it draws and learns the same; --steps counts the whole run."""
    user("regex", "^[ -Z]")
    one, two = tmp_path / "one", tmp_path / "two"
    log = {"rl_training__trajectory_log": tmp_path / "one.jsonl"}
    alone = config(tmp_path, "grpo", checkpointing__checkpoint_dir=one, **log)
    assert run(alone, replace(OPTIONS, steps=5), View()) == 0
    keys = {"checkpointing__checkpoint_dir": two, "rl_training__trajectory_log": tmp_path / "two.jsonl"}
    for number, signals in ((2, signal.SIGINT), (4, signal.SIGTERM)):
        view = View(then=lambda view, n=number, s=signals: view.reports[-1].step == n and os.kill(os.getpid(), s))
        assert run(config(tmp_path, "grpo", **keys), replace(OPTIONS, steps=5), view) == 128 + signals
        assert view.made == number - 2
        assert f"checkpoint-{number}" in (two / "default" / "latest").read_text()
    view = View()
    assert run(config(tmp_path, "grpo", **keys), replace(OPTIONS, steps=5), view) == 0
    assert (view.made, [report.step for report in view.reports]) == (4, [5])
    went_on, whole = drawn(tmp_path / "two.jsonl"), drawn(tmp_path / "one.jsonl")
    assert len(whole) == 5 * PROMPTS * GROUP
    assert went_on == whole
    for name, leaf in weights_in(one).items():  # batches of other rows are rounded otherwise
        np.testing.assert_allclose(weights_in(two)[name], leaf, atol=1e-5)
    view = View()
    assert run(config(tmp_path, "grpo", **keys), replace(OPTIONS, steps=5), view) == 0
    assert (view.made, view.reports) == (5, []), "there is nothing left to do"
    begun = [start.lineage for start in read_record(two).starts]
    saved = {n: {"default": f"default@{n} of {two / 'default' / f'checkpoint-{n}'}"} for n in (2, 4, 5)}
    assert begun == [{}, saved[2], saved[4], saved[5]]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, their number is left to the system")
def test_a_run_keeps_the_threads_that_it_began_with(tmp_path: Path, user, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number changes the last bits of an update, and one that is made again must be the same."""
    user("regex", "^[ -Z]")
    told: list[int] = []
    monkeypatch.setattr(mlx_parallm, "BLAS", replace(mlx_parallm.BLAS, set_threads=told.append))
    monkeypatch.setattr(processors, "usable_cores", lambda: 2)
    for busy, folder, steps in ((1.8, "busy", 1), (0.0, "busy", 2), (0.0, "quiet", 1), (1.8, "quiet", 2)):
        monkeypatch.setattr(processors.OtherPrograms, "cores", lambda self, busy=busy: busy)
        settings = config(tmp_path, "grpo", checkpointing__checkpoint_dir=tmp_path / folder)
        assert run(settings, replace(OPTIONS, steps=steps), View()) == 0
    assert told == [1, 1]


_CHILD = """
import os, signal, sys
from pathlib import Path
from app.test_train import OPTIONS
from training_runs import View, config
from dataclasses import replace
from mlx_parallm.app.train import run

kill_at = int(sys.argv[2])
def then(view):
    if view.reports[-1].step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

path = Path(sys.argv[1])
keys = {"checkpointing__checkpoint_dir": path / "two", "checkpointing__interval": 4}
sys.exit(run(config(path, "grpo", **keys), replace(OPTIONS, steps=7), View(then=then)))
"""


@pytest.mark.timeout(240)
def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(tmp_path: Path, user) -> None:
    """The journal makes the updates since the last checkpoint again, and the tasks go on."""
    user("regex", "^[ -Z]")
    one, two = tmp_path / "one", tmp_path / "two"
    whole = View()
    keys = {"checkpointing__checkpoint_dir": one, "checkpointing__interval": 4}
    assert run(config(tmp_path, "grpo", **keys), replace(OPTIONS, steps=7), whole) == 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for kill_at, saved in ((2, False), (5, True)):  # the first is killed before any checkpoint
        child = [sys.executable, "-c", _CHILD, str(tmp_path), str(kill_at)]
        assert subprocess.run(child, env=environment, timeout=100, check=False).returncode == -signal.SIGKILL
        assert summarize(two).state == RunState.KILLED
        assert summarize(two).steps == kill_at
        assert (two / "default" / "latest").exists() is saved
    view = View()
    keys = {"checkpointing__checkpoint_dir": two, "checkpointing__interval": 4, "checkpointing__resume": True}
    assert run(config(tmp_path, "grpo", **keys), replace(OPTIONS, steps=7), view) == 0
    assert (view.made, [report.step for report in view.reports]) == (5, [6, 7])
    rewards = [report.metrics["reward_mean"] for report in whole.reports[5:]]
    assert [report.metrics["reward_mean"] for report in view.reports] == rewards
    for name, leaf in weights_in(one).items():  # batches of other rows are rounded otherwise
        np.testing.assert_allclose(weights_in(two)[name], leaf, atol=1e-5)
    assert summarize(two).state == RunState.FINISHED


@pytest.mark.timeout(120)
def test_one_bad_task_costs_itself_and_most_of_them_end_the_run_saved(tmp_path: Path, user) -> None:
    user("regex", "^[ -Z]", long=(3, *range(7, 99)))
    view, kept = View(), tmp_path / "kept"
    with pytest.raises(TrainingFailedError, match=r"[34] of the last 4 tasks failed.*tokens"):
        run(config(tmp_path, "grpo", checkpointing__checkpoint_dir=kept), replace(OPTIONS, steps=9), view)
    assert [report.metrics["failed_tasks"] for report in view.reports] == [0, 1, 0, 2, 2]
    lines = [json.loads(line) for line in (kept / "metrics.jsonl").read_text().splitlines()]
    assert [len(line["failures"]) for line in lines] == [0, 1, 0, 2, 2]
    assert [failure.partition(":")[0] for failure in view.failures] == [f"task {n}" for n in (2, 6, 7, 8, 9)]
    assert [report.status for report in view.reports] == ["published"] * 3 + ["skipped"] * 2
    assert (kept / "default" / "latest").read_text() == "checkpoint-3\n"


@pytest.mark.timeout(120)
def test_a_full_disk_at_the_end_is_an_error_and_leaves_nothing_half_written(
    tmp_path: Path, user, monkeypatch: pytest.MonkeyPatch
) -> None:
    user("regex")
    kept = tmp_path / "kept"

    def full(view: View) -> None:
        def refuse(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("mlx_parallm.atomic.write_file", refuse)

    with pytest.raises(StorageError, match="a checkpoint of default was not saved: No space left"):
        run(config(tmp_path, checkpointing__checkpoint_dir=kept), OPTIONS, View(then=full))
    assert list((kept / "default").iterdir()) == []


@pytest.mark.timeout(120)
def test_a_run_whose_journal_cannot_be_written_ends_with_the_reason(
    tmp_path: Path, user, monkeypatch: pytest.MonkeyPatch
) -> None:
    user("regex")

    def full(view: View) -> None:
        def refuse(*_: object) -> None:
            raise StorageError("the journal of the run cannot be written: database or disk is full")

        monkeypatch.setattr(JournalFile, "commit", refuse)

    view = View(then=full)
    with pytest.raises(StorageError, match="disk is full"):
        run(config(tmp_path, checkpointing__checkpoint_dir=tmp_path / "kept"), replace(OPTIONS, steps=9), view)
    assert len(view.reports) == 1, "no step is made whose answers are not kept"


@pytest.mark.timeout(120)
def test_a_run_without_a_folder_makes_one_and_says_so(
    tmp_path: Path, user, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    user("regex")
    monkeypatch.chdir(tmp_path)
    view = View()
    assert run(config(tmp_path), replace(OPTIONS, steps=1), view) == 0
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert view.facts["checkpoints"] == f"checkpoints/{folder.name}, a new run; --resume resumes the newest"
    assert (folder / "default" / "checkpoint-1").is_dir()
    assert "changed since" not in caplog.text
    view, keys = View(), {"checkpointing__resume": True, "rl_training__optimizer__learning_rate": 2e-3}
    assert run(config(tmp_path, **keys), replace(OPTIONS, steps=2), view) == 0
    assert (view.made, [report.step for report in view.reports]) == (1, [2])
    change = "changed since the run's last start: rl_training.optimizer.learning_rate 0.001 -> 0.002"
    assert [r.getMessage() for r in caplog.records if "changed since" in r.getMessage()] == [change]
    assert "training default: 0.0M parameters, rank 4" in caplog.messages
    assert "loading model, and measuring how fast this machine computes it" in caplog.messages


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
def test_tasks_that_cannot_be_scored_end_the_run_before_the_model_is_loaded(
    tmp_path: Path, user, monkeypatch: pytest.MonkeyPatch
) -> None:
    user("no_such_scorer")
    view = View()
    monkeypatch.setattr("mlx_parallm.app.build.ContinuousBatchProcessor.start", None)
    with pytest.raises(ConfigError, match="no_such_scorer"):
        run(config(tmp_path, checkpointing__checkpoint_dir=tmp_path / "kept"), OPTIONS, view)
    assert view.facts == {}


@pytest.mark.timeout(120)
def test_a_file_of_tasks_is_trained_on_and_its_bad_lines_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [{"id": n, "prompt": f"{n} + 1 =", "answer": n + 1, "scoring_function": "exact"} for n in range(4)]
    file, log = tmp_path / "tasks.jsonl", tmp_path / "log.jsonl"
    file.write_text("\n".join(map(json.dumps, tasks)) + "\n{")
    settings = config(tmp_path, rl_training__environment=str(file), rl_training__trajectory_log=log)
    assert run(settings, TrainOptions(str(file), 2, GROUP, PROMPTS), View()) == 0
    drawn = [line["metadata"] for line in map(json.loads, log.read_text().splitlines())]
    assert {(metadata["problem_id"], metadata["answer"]) for metadata in drawn} == {
        (str(n), str(n + 1)) for n in range(4)
    }
    assert [r.getMessage()[:7] for r in caplog.records if "left out" in r.getMessage()] == ["line 5 "]


@pytest.mark.timeout(120)
def test_held_out_tasks_are_evaluated_and_not_trained_on(tmp_path: Path) -> None:
    tasks = [{"id": n, "prompt": f"{n} + 1 =", "answer": n + 1, "scoring_function": "exact"} for n in range(9)]
    file, log, kept = tmp_path / "tasks.jsonl", tmp_path / "log.jsonl", tmp_path / "kept"
    file.write_text("\n".join(map(json.dumps, tasks)))
    keys = {
        "rl_training__environment": str(file),
        "rl_training__trajectory_log": log,
        "rl_training__evaluation__every": 2,
        "rl_training__evaluation__size": 5,
        "checkpointing__checkpoint_dir": kept,
        "checkpointing__interval": 1,
    }
    view = View()
    assert run(config(tmp_path, "cross_entropy", **keys), TrainOptions(str(file), 4, GROUP, PROMPTS), view) == 0
    assert (view.first.adapter, view.first.step, view.first.answers) == (BASE_ADAPTER, 0, 5)
    assert view.facts["evaluation"] == "5 held-out tasks x 1, every 2 updates"
    trained = {json.loads(line)["metadata"]["problem_id"] for line in log.read_text().splitlines()}
    assert len(trained) == 4, "the other tasks of the file"
    lines = [json.loads(line) for line in (kept / "metrics.jsonl").read_text().splitlines()]
    assert (lines[0]["kind"], lines[0]["step"], lines[0]["adapter"]) == ("evaluation", 0, "base")
    assert [line["kind"] for line in lines[1:]] == ["update"] * 4


@pytest.mark.timeout(120)
def test_evaluations_are_in_the_reports_and_go_on_where_a_stopped_run_ended(tmp_path: Path, user) -> None:
    user("regex")
    keys = {
        "rl_training__environment": "letters",
        "rl_training__evaluation__every": 2,
        "rl_training__evaluation__size": 6,
        "checkpointing__checkpoint_dir": tmp_path / "kept",
    }
    view = View()
    assert run(config(tmp_path, "grpo", **keys), replace(OPTIONS, steps=4), view) == 0
    assert [report.metrics.get("eval_answers") for report in view.reports] == [None, 6, None, 6]
    for report in view.reports[1::2]:
        assert report.metrics["eval_low"] <= report.metrics["eval_mean"] <= report.metrics["eval_high"]
    view = View()
    assert run(config(tmp_path, "grpo", **keys), replace(OPTIONS, steps=7), view) == 0
    assert view.first is None, "the version was evaluated before"
    evaluated = [report.metrics.get("eval_answers") for report in view.reports]
    assert evaluated == [None, 6, 6], "the last version is evaluated, whatever its number"


@pytest.mark.timeout(120)
def test_the_temperature_and_the_system_prompt_are_those_of_the_settings(tmp_path: Path) -> None:
    tasks = [{"prompt": f"{n} + 1 =", "answer": n + 1, "scoring_function": "exact"} for n in range(4)]
    file, log, prompt = tmp_path / "tasks.jsonl", tmp_path / "log.jsonl", tmp_path / "prompt.txt"
    file.write_text("\n".join(map(json.dumps, tasks)))
    prompt.write_text("Answer as a pirate.\n")
    lengths = []
    for text in (None, f"@{prompt}"):
        log.unlink(missing_ok=True)
        keys = {"rl_training__environment": str(file), "rl_training__trajectory_log": log}
        keys |= {"rl_training__rollout_temperature": 0.5, "rl_training__system_prompt": text}
        settings = config(tmp_path, checkpointing__checkpoint_dir=tmp_path / f"kept{text is None}", **keys)
        assert run(settings, TrainOptions(str(file), 1, GROUP, PROMPTS), View()) == 0
        drawn = [json.loads(line) for line in log.read_text().splitlines()]
        assert {line["temperature"] for line in drawn} == {0.5}
        lengths.append(max(len(line["prompt_token_ids"]) for line in drawn))
    assert lengths[0] < lengths[1]


def test_an_unknown_environment_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    absent = configure(tmp_path / "no model", None, None)
    with pytest.raises(ConfigError, match="letterz"):
        run(absent, TrainOptions("letterz", 1, 2, 1), View())
