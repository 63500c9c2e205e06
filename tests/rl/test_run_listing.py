"""The record of a run, and the list of runs: what each of them is doing, or how it has ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_parallm.adapters.runs import JOURNAL, METRICS, RECORD, open_run, process_of
from mlx_parallm.cli.main import main
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.record import RunFile, RunState, list_runs, read_record, summarize
from mlx_parallm.rl.runs.records import PolicyChange, Update
from mlx_parallm.rl.runs.store import JournalFile
from mlx_parallm.rl.tracking import read_metrics, recorded_events
from mlx_parallm.rl.trajectory_log import count_lines, of_trainee


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begun(folder: Path, **command: object) -> RunFile:
    run = open_run(folder, False, wanted=True)
    run.close()
    return RunFile(folder, run.id, {"server": {"port": 8000}}, command, {"default": "default@3 of here"})


async def updated(folder: Path, *updates: Update) -> None:
    journal = Journal(JournalFile(folder / JOURNAL))
    for number, update in enumerate(updates, 1):
        await journal.changed(PolicyChange("default", number, 1000.0 + number, update))
    await journal.close()


def update(step: int, reward: float, **progress: float) -> Update:
    return Update((), None, True, step, "published", step, {"reward_mean": reward}, progress)


async def test_each_run_says_how_far_it_is_and_how_it_ended() -> None:
    finished, interrupted, killed, failed = (Path("runs") / name for name in "abcd")
    begun(finished).end(RunState.FINISHED)
    await updated(finished, update(1, 0.25, run_steps=4.0), update(2, 0.5, run_steps=7.0))
    begun(interrupted).end(RunState.INTERRUPTED, "it was stopped by SIGINT")
    await updated(interrupted, update(1, 0.25))
    begun(killed)
    begun(failed).end(RunState.FAILED, "most tasks failed")
    assert [(run.state, run.steps, run.reward) for run in list_runs(Path("runs"))] == [
        (RunState.FINISHED, 7, 0.5),
        (RunState.INTERRUPTED, 1, 0.25),
        (RunState.KILLED, 0, None),
        (RunState.FAILED, 0, None),
    ]
    assert summarize(finished).at == 1002.0
    assert summarize(interrupted).reason == "it was stopped by SIGINT"
    assert list_runs(finished) == (summarize(finished),)


def test_a_run_whose_process_lives_is_told_by_its_lock() -> None:
    holds = (
        "import time; from pathlib import Path; from mlx_parallm.adapters.runs import open_run; "
        "run = open_run(Path('mine'), False, True); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holds], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        assert process_of(Path("mine")) == other.pid
        found = summarize(Path("mine"))
        assert (found.state, found.process, found.reason) == (RunState.RUNNING, other.pid, f"process {other.pid}")
        other.kill()
    assert process_of(Path("mine")) is None
    open_run(Path("mine"), False, wanted=True).close()


async def test_a_run_of_the_train_command_has_the_steps_that_it_made_and_what_seeds_are_compared_by(capsys) -> None:
    run = open_run(Path("runs/one"), False, wanted=True)
    run.close()
    RunFile(Path("runs/one"), run.id, {"rl_training": {"seed": 7}}, {"steps": 2}, {}).end(RunState.FINISHED)
    await updated(Path("runs/one"), update(1, 0.25, run_steps=1.0))
    common = {"adapter": "default", "version": 1, "optimizer_step": 1}
    write_metrics(
        Path("runs/one"),
        {"kind": "evaluation", "step": 0, "eval_mean": 0.1, "eval_low": 0.0, "eval_high": 0.2, **common},
        {"kind": "update", "step": 1, "status": "published", "reward_mean": 0.25, **common},
        {
            "kind": "update",
            "step": 2,
            "status": "held",
            "reward_mean": 0.5,
            "eval_mean": 0.3,
            "eval_low": 0.2,
            "eval_high": 0.4,
            **common,
        },
    )
    found = summarize(Path("runs/one"))
    assert (found.steps, found.reward, found.evaluation) == (2, 0.5, (0.3, 0.2, 0.4))
    assert (found.adapter, found.seed) == ("default", 7)
    assert main(["runs"]) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert line.split()[:9] == ["runs/one", "finished", "2", "0.500", "0.300", "[0.20,", "0.40]", "default", "7"]


def write_metrics(folder: Path, *lines: dict[str, object]) -> None:
    (folder / METRICS).write_text("".join(json.dumps({"at": 2000.0, **line}) + "\n" for line in lines))


def test_metrics_are_read_by_steps_and_what_was_made_again_counts_once() -> None:
    first = {"kind": "update", "status": "published", "adapter": "default"}
    write_metrics(
        Path(),
        {**first, "step": 1, "version": 1, "optimizer_step": 1, "reward_mean": 0.25, "checkpoint": None},
        {**first, "step": 2, "version": 2, "optimizer_step": 2, "reward_mean": 0.5, "kl": None},
        {**first, "step": 2, "version": 2, "optimizer_step": 2, "reward_mean": 0.75, "checkpoint": "checkpoint-2"},
        {"kind": "evaluation", "step": 1, "adapter": "base", "version": 0, "eval_mean": 0.5},
    )
    with Path(METRICS).open("a") as file:
        file.write('[]\n{"step": 3}\n{"step": 3, "at"')
    evaluated, one, two = read_metrics(Path(METRICS))
    assert (evaluated.step, evaluated.is_update, evaluated.report.evaluation) == (1, False, None)
    assert (one.step, one.report.status, one.report.metrics) == (1, "published", {"reward_mean": 0.25})
    assert (two.report.adapter, two.report.step) == (AdapterRef("default", 2), 2)
    assert (two.report.metrics, two.report.checkpoint) == ({"reward_mean": 0.75}, "checkpoint-2")
    assert read_metrics(Path("nothing.jsonl")) == []


@pytest.mark.parametrize(
    "line", ["[" * 50_000, '{"step": 1e400}', '{"adapter": "a", "at": []}', '{"adapter": "a", "at": "x"}']
)
def test_lines_that_are_no_record_are_left_out(tmp_path: Path, line: str) -> None:
    good = '{"adapter": "a", "step": 1, "at": 1.0, "kind": "update", "status": "published"}'
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n{good}\n")
    assert [made.step for made in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert [event.kind for event in recorded_events(tmp_path / "metrics.jsonl")] == ["update"]
    (tmp_path / "log.jsonl").write_text(f'{line}\n{{"trainee": "a"}}\n')
    assert count_lines(tmp_path / "log.jsonl", of_trainee("a")) == 1


def test_a_record_that_cannot_be_read_is_one_line_of_the_list() -> None:
    begun(Path("mine"))
    for content in ('{"id": 5}', "[" * 50_000, '{"format": 1e400, "id": []}'):
        (Path("mine") / RECORD).write_text(content)
        assert "run.json " in summarize(Path("mine")).reason
    (Path("mine") / RECORD).write_text('{"format": 9}')
    with pytest.raises(ConfigError, match="newer version"):
        read_record(Path("mine"))


def test_the_record_has_the_configuration_and_every_start() -> None:
    begun(Path("mine"), steps=5).end(RunState.FINISHED)
    begun(Path("mine"), steps=9)
    record = read_record(Path("mine"))
    assert record is not None
    assert (record.state, record.ended, record.command) == (RunState.RUNNING, None, {"steps": 9})
    assert record.configuration == {"server": {"port": 8000}}
    assert [start.lineage for start in record.starts] == [{"default": "default@3 of here"}] * 2
    assert {"mlx", "mlx_parallm"} <= record.starts[0].versions.keys()
    assert json.loads((Path("mine") / RECORD).read_text())["id"] == record.id


def test_settings_that_have_changed_since_the_last_start_are_named() -> None:
    run = open_run(Path("mine"), False, wanted=True)
    run.close()

    def started(rate: float, port: int, **command: object) -> tuple[str, ...]:
        settings = {"rl_training": {"optimizer": {"learning_rate": rate}, "seed": 0}, "server": {"port": port}}
        return RunFile(Path("mine"), run.id, settings, command, {}).changes

    assert started(0.001, 8000, steps=5, group_size=8) == ()
    assert started(0.001, 8001, steps=9, group_size=8) == (), "nothing that training depends on"
    assert started(0.002, 8001, steps=9, group_size=4) == (
        "rl_training.optimizer.learning_rate 0.001 -> 0.002",
        "group_size 8 -> 4",
    )


async def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    assert "no runs below checkpoints and runs;" in capsys.readouterr().out
    begun(Path("checkpoints/one")).end(RunState.FAILED, "the disk\nwas full")
    await updated(Path("checkpoints/one"), update(3, 0.75))
    assert main(["runs"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["run", "state", "steps", "reward"]
    assert line.split()[:4] == ["checkpoints/one", "failed", "3", "0.750"]
    assert line.endswith("the disk was full")
    begun(Path("runs/two")).end(RunState.FINISHED)
    assert main(["runs"]) == 0
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines()] == ["run", "checkpoints/one", "runs/two"]
    assert main(["runs", "nowhere"]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err
