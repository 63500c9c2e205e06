"""Paths into a run that mean an adapter: the run, an adapter of it, `latest`, a tag, a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from saves import LAYOUT, NAME, manager, ref, weights

from mlx_parallm.adapters.files import AdapterRoots
from mlx_parallm.adapters.runs import LOCK, adapter_in
from mlx_parallm.adapters.service import AdapterLibrary
from mlx_parallm.errors import AdapterFileError, InvalidRequestError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three checkpoints, of which the second is the latest by choice, and the third the best."""
    folder = tmp_path / "run"
    store = manager(folder)
    for step in (1, 2, 10):
        store.save_checkpoint(ref(step), weights(step), step, tags=["best"] if step == 10 else [])
    store.set_latest(NAME, "checkpoint-2")
    (folder / LOCK).touch()
    return folder


@pytest.mark.parametrize(
    ("path", "checkpoint"),
    [
        ("", "checkpoint-2"),
        (NAME, "checkpoint-2"),
        (f"{NAME}/latest", "checkpoint-2"),
        (f"{NAME}/best", "checkpoint-10"),
        (f"{NAME}/checkpoint-1", "checkpoint-1"),
    ],
)
def test_a_path_into_a_run_means_a_checkpoint(run: Path, path: str, checkpoint: str) -> None:
    assert adapter_in(run / path) == run / NAME / checkpoint
    library = AdapterLibrary(LAYOUT, 8, roots=[run.parent])
    assert library.read(str(run / path)).info.root == str((run / NAME / checkpoint).resolve())


def test_without_a_usable_latest_the_highest_step_counts(run: Path) -> None:
    (run / NAME / "latest").write_text("checkpoint-7\n")
    assert adapter_in(run / NAME) == run / NAME / "checkpoint-10"
    (run / NAME / "latest").write_text("../../elsewhere\n")
    assert adapter_in(run / NAME / "latest") == run / NAME / "checkpoint-10"


@pytest.mark.parametrize("path", ["nothing", f"{NAME}/nothing", f"{NAME}/tags.json", "run.lock"])
def test_other_paths_mean_themselves(run: Path, path: str) -> None:
    assert adapter_in(run / path) == run / path
    (run / NAME / "tags.json").write_text("no json")
    assert adapter_in(run / NAME / "best") == run / NAME / "best"


def test_a_tag_leads_nowhere_else(run: Path) -> None:
    (run / NAME / "tags.json").write_text('{"best": "../../../outside"}')
    assert adapter_in(run / NAME / "best") == run / NAME / "best"
    with pytest.raises(InvalidRequestError, match="no directory inside the allowed roots"):
        AdapterRoots([run], adapter_in).resolve(f"{NAME}/best")


def test_a_run_with_several_adapters_is_refused_with_their_names(run: Path) -> None:
    manager(run).save_checkpoint(ref(1, "tone"), weights(7), 1)
    with pytest.raises(AdapterFileError, match=f"run is a run with several adapters, {NAME}, tone: name one"):
        adapter_in(run)
    assert adapter_in(run / "tone") == run / "tone" / "checkpoint-1"


def test_a_refusal_says_what_the_operator_can_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="start the server with --allowed-adapter-roots FOLDER"):
        AdapterRoots([tmp_path / "a"]).resolve("/etc")
