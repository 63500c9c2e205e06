"""The folder that a run keeps its checkpoints in: which one it is, and that nobody else uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_parallm.adapters.checkpoints import read_folders
from mlx_parallm.adapters.runs import MANIFEST, ROOT, open_run
from mlx_parallm.errors import ConfigError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved(run_folder: Path) -> None:
    """As good as a checkpoint, for all that this needs."""
    folder = run_folder / "default" / "checkpoint-1"
    folder.mkdir(parents=True)
    (folder / MANIFEST).touch()


def test_each_run_has_a_folder_of_its_own_and_nothing_old_goes_on_unasked() -> None:
    first, second = open_run(None, False, wanted=True), open_run(None, False, wanted=True)
    assert first.path.parent == second.path.parent == ROOT
    assert first.path != second.path
    assert first.id != second.id
    assert not first.resumed
    saved(first.path)
    first.close()
    second.close()
    assert open_run(None, False, wanted=False) is None
    third = open_run(None, False, wanted=True)
    assert not third.resumed
    (third.path / "metrics.jsonl").write_text("{}")
    third.close()
    assert [folder.name for folder in ROOT.iterdir()] == [first.path.name], "a run without checkpoints leaves nothing"


def test_a_full_disk_does_not_take_the_runs_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_run(tmp_path / "run", False, wanted=True)
    assert first is not None
    first.close()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(ConfigError, match="No space left on device; give another --checkpoint-dir"):
            open_run(tmp_path / "run", False, wanted=True)
    again = open_run(tmp_path / "run", False, wanted=True)
    assert again is not None
    assert again.id == first.id
    again.close()


def test_the_newest_run_that_has_learnt_is_resumed_and_keeps_its_id() -> None:
    with pytest.raises(ConfigError, match="no run below checkpoints holds a checkpoint or a journal"):
        open_run(None, True, wanted=True)
    for name in ("20250101-000000-aaaa", "20250102-000000-aaaa"):
        run = open_run(ROOT / name, False, wanted=True)
        saved(run.path)
        run.close()
    killed = open_run(ROOT / "20250103-000000-aaaa", False, wanted=True)  # before its first checkpoint
    again = open_run(None, True, wanted=False)
    assert again.path.name == "20250102-000000-aaaa"
    assert (again.id, again.resumed) == (run.id, True)
    again.close()
    killed.close()


def test_a_folder_that_is_named_goes_on() -> None:
    named = Path("mine")
    with pytest.raises(ConfigError, match="mine holds no checkpoint and no journal"):
        open_run(named, True, wanted=True)
    run = open_run(named, False, wanted=True)
    assert (run.path, run.resumed) == (named, False)
    saved(named)
    run.close()
    again = open_run(named, True, wanted=True)
    assert (again.resumed, again.id) == (True, run.id)
    again.close()


def test_a_folder_of_runs_is_no_runs_folder_and_runs_in_one_are_no_adapters() -> None:
    run = open_run(None, False, wanted=True)
    saved(run.path)
    run.close()
    with pytest.raises(ConfigError, match=f"holds 1 runs.*such as {run.path}"):
        open_run(ROOT, False, wanted=True)
    saved(ROOT)  # a folder that was used before runs had folders
    older = open_run(ROOT, False, wanted=True)
    assert older.resumed
    assert [folder.path.name for folder in read_folders(ROOT)] == ["default"]
    older.close()


def test_a_second_process_is_refused_until_the_first_has_ended_however_it_did() -> None:
    holds = (
        "import time, sys; from pathlib import Path; from mlx_parallm.adapters.runs import open_run; "
        "run = open_run(Path('mine'), False, True); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holds], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=rf"another process \({other.pid}\) uses mine"):
            open_run(Path("mine"), False, wanted=True)
        other.kill()
    open_run(Path("mine"), False, wanted=True).close()


def test_a_folder_that_cannot_be_written_is_named(here: Path) -> None:
    (here / "file").touch()
    with pytest.raises(ConfigError, match="--checkpoint-dir"):
        open_run(here / "file" / "below", False, wanted=True)
